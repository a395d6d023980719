#include "data/shards.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "data/text.h"

namespace prism {
namespace {

constexpr int32_t kMagic16 = 20240520, kMagic32 = 20240801;
using Header = std::array<int32_t, 256>;

[[noreturn]] void foreign_id(const TokenSpan& span, int64_t i, int64_t vocab) {
  PRISM_FAIL(span.file, ": token ", span.first + i, ": expected an id below the vocabulary's ", vocab,
             ", got ", span[i]);
}

// Calls fn(ids, i) with the ids as their type: loops over them then have no test of the width inside.
template <class Fn>
auto with_ids(const TokenSpan& span, const Fn& fn) {
  return span.width == 2 ? fn(static_cast<const uint16_t*>(span.data))
                         : fn(static_cast<const uint32_t*>(span.data));
}

}  // namespace

TokenSpan TokenSpan::slice(int64_t begin, int64_t end) const {
  TokenSpan part = *this;
  part.data = static_cast<const char*>(data) + begin * width;
  part.count = end - begin;
  part.first = first + begin;
  return part;
}

TokenSpan span_of(std::vector<int32_t> ids, const std::string& file) {
  const auto owner = std::make_shared<const std::vector<int32_t>>(std::move(ids));
  return {owner, owner->data(), 4, static_cast<int64_t>(owner->size()), file, 0};
}

TokenSpan open_shard(const std::string& path, bool raw_u16) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  PRISM_CHECK(file >= 0, path, ": ", std::strerror(errno));
  struct stat info {};
  const bool known = ::fstat(file, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0;
  const auto size = static_cast<size_t>(known ? info.st_size : 0);
  void* memory = known ? ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
  ::close(file);
  PRISM_CHECK(known, path, ": expected a file of token ids, got ",
              S_ISREG(info.st_mode) ? "an empty one" : "another thing");
  PRISM_CHECK(memory != MAP_FAILED, path, ": cannot map it: ", std::strerror(errno));
  const std::shared_ptr<const void> owner(memory, [size](void* m) { ::munmap(m, size); });

  const char* bytes = static_cast<const char*>(memory);
  refuse_lfs_pointer({bytes, size}, path);
  TokenSpan span{owner, bytes, 2, 0, path, 0};
  if (raw_u16) {
    PRISM_CHECK(size % 2 == 0, path, ": expected uint16 ids, got an odd number of bytes, ", size);
    span.count = static_cast<int64_t>(size / 2);
    return span;
  }
  PRISM_CHECK(size >= sizeof(Header), path, ": truncated: expected a header of ", sizeof(Header),
              " bytes, got a file of ", size);
  int32_t header[3];
  std::memcpy(header, bytes, sizeof header);
  const auto [magic, version, count] = header;
  PRISM_CHECK(magic == kMagic16 || magic == kMagic32, path, ": byte 0: expected the magic ", kMagic16, " or ",
              kMagic32, ", got ", magic);
  PRISM_CHECK(version == 1 || (magic == kMagic32 && version == 7), path, ": byte 4: expected version ",
              magic == kMagic16 ? "1" : "7 or 1", ", got ", version);
  span.width = magic == kMagic16 ? 2 : 4;
  span.count = count;
  const auto body = static_cast<int64_t>(size - sizeof(Header));
  PRISM_CHECK(count > 0 && body == span.count * span.width, path, ": byte 8: the header says ", count,
              " ids, expected ", body / span.width, " (", body, " bytes of ", span.width, " an id follow)");
  span.data = bytes + sizeof(Header);
  return span;
}

ShardWriter::ShardWriter(std::string path, int width)
    : path_(std::move(path)), width_(width), file_(std::fopen(path_.c_str(), "wb"), std::fclose) {
  PRISM_CHECK(file_, path_, ": ", std::strerror(errno));
  write_header();
}

void ShardWriter::write(const void* bytes, size_t size) {
  PRISM_CHECK(std::fwrite(bytes, 1, size, file_.get()) == size, path_, ": ", std::strerror(errno));
}

void ShardWriter::write_header() {
  const Header header{width_ == 2 ? kMagic16 : kMagic32, width_ == 2 ? 1 : 7, static_cast<int32_t>(count_)};
  write(header.data(), sizeof header);
}

void ShardWriter::append(const int32_t* ids, int64_t count) {
  count_ += count;
  if (width_ == 4) return write(ids, static_cast<size_t>(count) * 4);
  const std::vector<uint16_t> narrow(ids, ids + count);
  write(narrow.data(), narrow.size() * 2);
}

void ShardWriter::finish() {
  std::rewind(file_.get());
  write_header();
  PRISM_CHECK(std::fclose(file_.release()) == 0, path_, ": ", std::strerror(errno));
}

void TokenStream::append(TokenSpan span) {
  if (span.count == 0) return;
  begins_.push_back(size_);
  size_ += span.count;
  spans_.push_back(std::move(span));
}

void TokenStream::append(const TokenStream& other) {
  for (const TokenSpan& span : other.spans_) append(span);
}

void TokenStream::copy(int64_t begin, int64_t count, int64_t vocab, int32_t* out) const {
  PRISM_CHECK(begin >= 0 && begin + count <= size_, "token stream: ids [", begin, ", ", begin + count,
              ") asked for, it has ", size_);
  auto s = static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), begin) - begins_.begin()) - 1;
  for (; count > 0; ++s) {
    const TokenSpan& span = spans_[s];
    const int64_t from = begin - begins_[s], n = std::min(count, span.count - from);
    with_ids(span, [&](const auto* ids) {
      for (int64_t i = 0; i < n; ++i) {
        if (static_cast<int64_t>(ids[from + i]) >= vocab) foreign_id(span, from + i, vocab);
        out[i] = static_cast<int32_t>(ids[from + i]);
      }
    });
    begin += n, count -= n, out += n;
  }
}

void TokenStream::check_ids(int64_t vocab, int64_t count) const {
  for (const TokenSpan& span : spans_)
    with_ids(span, [&](const auto* ids) {
      const auto* end = ids + std::min(count, span.count);
      const auto* bad = std::find_if(ids, end, [&](auto id) { return static_cast<int64_t>(id) >= vocab; });
      if (bad != end) foreign_id(span, bad - ids, vocab);
    });
}

int64_t TokenStream::find(int32_t id, int64_t from) const {
  for (size_t s = 0; s < spans_.size(); ++s) {
    const int64_t skip = std::max<int64_t>(0, from - begins_[s]);
    if (skip >= spans_[s].count) continue;
    const int64_t at = with_ids(spans_[s], [&](const auto* ids) {
      return std::find(ids + skip, ids + spans_[s].count, static_cast<uint32_t>(id)) - ids;
    });
    if (at < spans_[s].count) return begins_[s] + at;
  }
  return size_;
}

}  // namespace prism
