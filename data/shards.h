// Token ids on disk and streams of them. A shard is a file in llm.c's format: 256 int32 of header (magic,
// version, count, zeros), then the ids: uint16 after magic 20240520 version 1, uint32 after magic 20240801
// version 7 (a reader accepts 1).
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "tensor/check.h"

namespace prism {

// Consecutive ids in memory that somebody keeps alive: a mapped file, a tokenized text.
struct TokenSpan {
  std::shared_ptr<const void> owner;
  const void* data = nullptr;
  int width = 4;  // bytes an id: 2 or 4
  int64_t count = 0;
  std::string file;   // where the ids come from, for errors
  int64_t first = 0;  // position of data[0] among the file's ids

  uint32_t operator[](int64_t i) const {
    return width == 2 ? static_cast<const uint16_t*>(data)[i] : static_cast<const uint32_t*>(data)[i];
  }
  TokenSpan slice(int64_t begin, int64_t end) const;  // ids [begin, end)
};

TokenSpan span_of(std::vector<int32_t> ids, const std::string& file);

// Maps a shard, or with `raw_u16` a nanoGPT file: uint16 ids and no header. Throws, naming file and place,
// for a wrong magic or version, a body that is not as long as the header says, a Git LFS pointer, or no ids.
TokenSpan open_shard(const std::string& path, bool raw_u16 = false);

// Writes a shard. Its header says 0 ids, which no reader accepts, until finish(). Every failed write throws.
class ShardWriter {
 public:
  ShardWriter(std::string path, int width);
  void append(const int32_t* ids, int64_t count);
  const std::string& path() const { return path_; }
  int64_t count() const { return count_; }
  void finish();

 private:
  void write(const void* bytes, size_t size);
  void write_header();
  std::string path_;
  int width_;
  int64_t count_ = 0;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

// Spans one after another.
class TokenStream {
 public:
  void append(TokenSpan span);
  void append(const TokenStream& other);
  int64_t size() const { return size_; }
  const std::vector<TokenSpan>& spans() const { return spans_; }
  // Copies ids [begin, begin + count). Throws, naming file and position, when one is not below `vocab`.
  void copy(int64_t begin, int64_t count, int64_t vocab, int32_t* out) const;
  // Throws as copy() does, having looked at the first `count` ids of each span.
  void check_ids(int64_t vocab, int64_t count) const;
  // Position of the first id equal to `id` at or after `from`; size() when there is none. Documents open at
  // each bos: the one at `from` ends at find(bos, from + 1).
  int64_t find(int32_t id, int64_t from) const;

 private:
  std::vector<TokenSpan> spans_;
  std::vector<int64_t> begins_;  // of each span in the stream
  int64_t size_ = 0;
};

}  // namespace prism
