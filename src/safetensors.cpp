#include "src/safetensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

namespace prism {

using nlohmann::json;

namespace {

static_assert(std::endian::native == std::endian::little, "safetensors: the bytes are written as they lie");

constexpr uint64_t kMaxHeader = 100'000'000;  // the reference implementation's limit
constexpr int64_t kSlice = 1 << 20;           // elements converted or moved between devices at a time

constexpr const char* kDTypes[] = {"F64", "F32", "BF16", "I32"};  // by DType

// Bytes an element; 0 for a type this engine does not read.
int64_t stored_size(std::string_view dtype) {
  if (dtype == "F16") return 2;
  for (int i = 0; i < 4; ++i)
    if (dtype == kDTypes[i]) return size_of(static_cast<DType>(i));
  return 0;
}

std::string quoted(const std::string& name) { return shown(json(name)); }

float half_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value;
  if (exponent == 31)
    value = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  else
    value = exponent ? std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25)
                     : std::ldexp(static_cast<float>(mantissa), -24);
  return bits & 0x8000 ? -value : value;
}

// Element i of a tensor's bytes, which need not be aligned; a double holds every stored type exactly.
template <class T>
double load(const char* bytes, int64_t i) {
  T value;
  std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  if constexpr (std::is_same_v<T, uint16_t>)
    return half_to_float(value);
  else if constexpr (std::is_same_v<T, bf16>)
    return static_cast<float>(value);
  else
    return value;
}

void convert(std::string_view dtype, const char* from, int64_t count, DType to_type, char* to) {
  const auto load_from = dtype == "F32"    ? load<float>
                         : dtype == "BF16" ? load<bf16>
                         : dtype == "F16"  ? load<uint16_t>
                         : dtype == "I32"  ? load<int32_t>
                                           : load<double>;
  dispatch(to_type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Rounded = std::conditional_t<std::is_same_v<T, double>, double, float>;
    for (int64_t i = 0; i < count; ++i)
      reinterpret_cast<T*>(to)[i] = static_cast<T>(static_cast<Rounded>(load_from(from, i)));
  });
}

// One entry of the header, its offsets still relative to the data, checked against the data's size.
StoredTensor parse_entry(const json& entry, uint64_t data_bytes, const std::string& where, uint64_t& end) {
  const auto fail = [&](const std::string& expected, const json& got) {
    PRISM_FAIL(where, ": expected ", expected, ", got ", shown(got));
  };
  const auto counts = [](const json& list) {
    return list.is_array() &&
           std::all_of(list.begin(), list.end(), [](const json& n) { return n.is_number_unsigned(); });
  };
  if (!entry.is_object() || entry.size() != 3 || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.contains("data_offsets"))
    fail("an object of dtype, shape and data_offsets", entry);

  const json& dtype = entry["dtype"];
  if (!dtype.is_string() || stored_size(dtype.get<std::string>()) == 0)
    fail("dtype F64, F32, BF16, F16 or I32", dtype);

  const json& shape = entry["shape"];
  if (!counts(shape) || shape.size() > Shape::kMaxRank)
    fail(cat("a shape of at most ", Shape::kMaxRank, " whole numbers"), shape);
  StoredTensor tensor{dtype.get<std::string>(), {}, 0};
  // Extents of 0 count as 1 here, so that no product of extents overflows later either.
  int64_t bound = stored_size(tensor.dtype);
  for (const json& extent : shape) {
    const uint64_t e = extent.get<uint64_t>();
    if (e > INT64_MAX || __builtin_mul_overflow(bound, std::max<int64_t>(1, static_cast<int64_t>(e)), &bound))
      fail("a shape of fewer than 2^63 bytes", shape);
    tensor.shape.push_back(static_cast<int64_t>(e));
  }

  const json& offsets = entry["data_offsets"];
  if (!counts(offsets) || offsets.size() != 2) fail("data_offsets [begin, end]", offsets);
  tensor.begin = offsets[0].get<uint64_t>();
  end = offsets[1].get<uint64_t>();
  if (tensor.begin > end || end > data_bytes)
    fail(cat("data_offsets within the ", data_bytes, " bytes of data"), offsets);
  const uint64_t bytes = static_cast<uint64_t>(tensor.shape.numel() * stored_size(tensor.dtype));
  PRISM_CHECK(end - tensor.begin == bytes, where, ": expected ", bytes, " bytes for ", tensor.dtype, " ",
              tensor.shape, ", got ", end - tensor.begin, " by data_offsets");
  return tensor;
}

std::map<std::string, std::string> parse_metadata(const json& object, const std::string& where) {
  const bool strings = object.is_object() && std::all_of(object.begin(), object.end(),
                                                         [](const json& value) { return value.is_string(); });
  PRISM_CHECK(strings, where, ": __metadata__: expected an object of strings, got ", shown(object));
  return object.get<std::map<std::string, std::string>>();
}

}  // namespace

void write_safetensors(OutputFile& file, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& t : tensors) order.push_back(&t);
  std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return size_of(a->tensor.dtype) > size_of(b->tensor.dtype);
  });

  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t end = 0;
  for (const NamedTensor* t : order) {
    PRISM_CHECK(!header.contains(t->name), file.path(), ": tensor ", quoted(t->name),
                ": expected once, got twice");
    std::vector<int64_t> shape;
    for (int i = 0; i < t->tensor.shape.rank(); ++i) shape.push_back(t->tensor.shape[i]);
    const size_t begin = std::exchange(end, end + t->tensor.bytes());
    header[t->name] = {{"dtype", kDTypes[static_cast<int>(t->tensor.dtype)]},
                       {"shape", shape},
                       {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  file.write(&length, sizeof length);
  file.write(text);

  std::vector<char> slice;
  for (const NamedTensor* t : order) {
    const char* data = static_cast<const char*>(t->tensor.data);
    if (t->tensor.device == Device::cpu) {
      file.write(data, t->tensor.bytes());
      continue;
    }
    slice.resize(static_cast<size_t>(kSlice));
    for (size_t done = 0; done < t->tensor.bytes();) {
      const size_t n = std::min(slice.size(), t->tensor.bytes() - done);
      copy_out(t->tensor.device, slice.data(), data + done, n);
      file.write(slice.data(), n);
      done += n;
    }
  }
}

void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  replace_file(path, [&](OutputFile& file) { write_safetensors(file, tensors, metadata); });
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  uint64_t length = 0;
  PRISM_CHECK(file_.size() >= sizeof length + 2, path,
              ": expected a safetensors file of at least 10 bytes, got ", file_.size());
  file_.read(0, &length, sizeof length);
  const uint64_t most = std::min(kMaxHeader, file_.size() - sizeof length);
  PRISM_CHECK(length >= 2 && length <= most, path, ": expected a header of 2 to ", most, " bytes, got ",
              length);
  std::string text(length, '\0');
  file_.read(sizeof length, text.data(), length);
  PRISM_CHECK(text[0] == '{', path, ": expected the header to begin with {, got ", quoted(cat(text[0])));
  // A name that comes twice is found here: after parsing only one of the two would be left.
  const json header = parse_json(text, path);

  const uint64_t data_begin = sizeof length + length, data_bytes = file_.size() - data_begin;
  struct Range {
    uint64_t begin, end;
    std::string name;
  };
  std::vector<Range> ranges;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      metadata_ = parse_metadata(entry, path);
      continue;
    }
    PRISM_CHECK(!name.empty(), path, ": tensor \"\": expected a name, got none");
    uint64_t end = 0;
    StoredTensor tensor = parse_entry(entry, data_bytes, cat(path, ": tensor ", quoted(name)), end);
    ranges.push_back({tensor.begin, end, name});
    tensor.begin += data_begin;
    tensors_.emplace(name, tensor);
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  uint64_t end = 0;
  for (const Range& range : ranges) {
    PRISM_CHECK(range.begin == end, path, ": tensor ", quoted(range.name), ": expected its data at ", end,
                names_.empty() ? "" : cat(", where ", quoted(names_.back()), " ends"), ", got ", range.begin,
                range.begin < end ? " (an overlap)" : " (a hole)");
    end = range.end;
    names_.push_back(range.name);
  }
  PRISM_CHECK(end == data_bytes, path, ": expected the file to end after the last tensor, got ",
              data_bytes - end, " bytes more");
}

const StoredTensor& SafetensorsFile::info(const std::string& name) const {
  const auto at = tensors_.find(name);
  PRISM_CHECK(at != tensors_.end(), path(), ": tensor ", quoted(name), ": expected, got none of that name");
  return at->second;
}

void SafetensorsFile::read(const std::string& name, Tensor target) const {
  const StoredTensor& stored = info(name);
  const auto where = [&] { return cat(path(), ": tensor ", quoted(name)); };
  PRISM_CHECK(stored.shape == target.shape, where(), ": expected ", target.shape, ", got ", stored.shape);
  const bool same = stored.dtype == kDTypes[static_cast<int>(target.dtype)];
  const bool converts = target.dtype != DType::i32 && (stored.dtype != "I32" || target.dtype == DType::f64);
  PRISM_CHECK(same || converts, where(), ": expected values for ", target.dtype, ", got ", stored.dtype);

  char* data = static_cast<char*>(target.data);
  if (same && target.device == Device::cpu) return file_.read(stored.begin, data, target.bytes());
  const int64_t from_size = stored_size(stored.dtype), to_size = size_of(target.dtype),
                numel = target.numel();
  std::vector<char> from(static_cast<size_t>(std::min(kSlice, numel) * from_size));
  std::vector<char> to(static_cast<size_t>(std::min(kSlice, numel) * to_size));
  for (int64_t done = 0; done < numel; done += kSlice) {
    const int64_t count = std::min(kSlice, numel - done);
    const size_t bytes = static_cast<size_t>(count * to_size);
    file_.read(stored.begin + static_cast<uint64_t>(done * from_size), from.data(),
               static_cast<size_t>(count * from_size));
    if (!same) convert(stored.dtype, from.data(), count, target.dtype, to.data());
    copy_in(target.device, data + done * to_size, same ? from.data() : to.data(), bytes);
  }
}

}  // namespace prism
