#include "optim/parameters.h"

#include <algorithm>
#include <cmath>

#include "kernels/elementwise.h"
#include "tensor/parallel.h"
#include "tensor/rng.h"

namespace prism {

namespace {

// A weight's random stream is its name's (FNV-1a), so its draws don't depend on what else the model has.
uint64_t stream_of(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3ull;
  return hash;
}

double draw(const Init& init, uint64_t seed, uint64_t stream, uint64_t i) {
  switch (init.kind) {
    case Init::normal: return init.scale * random_normal(seed, stream, i);
    case Init::uniform: return init.scale * (2 * random_uniform(seed, stream, i) - 1);
    case Init::constant: return init.scale;
    case Init::decay_rate: return std::log(16 * (1 - random_uniform(seed, stream, i)));
    case Init::time_step: {
      const double u = random_uniform(seed, stream, i);
      const double dt = std::max(std::exp(std::log(0.001) + u * (std::log(0.1) - std::log(0.001))), 1e-4);
      return dt + std::log(-std::expm1(-dt));
    }
  }
  return 0;
}

}  // namespace

Slot Parameters::add_matrix(std::vector<Parameter> pieces, bool padded) {
  Piece slot{static_cast<int64_t>(list_.size()), static_cast<int64_t>(pieces.size()), 0, {}, true};
  int64_t rows = 0;
  for (Parameter& p : pieces) {
    p.decays = true;
    p.offset = rows * p.shape[-1];  // within the slot until allocate()
    rows += p.shape.numel() / p.shape[-1];
    list_.push_back(std::move(p));
  }
  const Shape& last = list_.back().shape;
  slot.shape = slot.count == 1 ? last : Shape{padded ? (rows + 7) / 8 * 8 : rows, last[-1]};
  slots_.push_back(slot);
  return {static_cast<int64_t>(slots_.size()) - 1};
}

Slot Parameters::add_vector(Parameter vector) {
  slots_.push_back({static_cast<int64_t>(list_.size()), 1, 0, vector.shape, false});
  vector.offset = 0;
  list_.push_back(std::move(vector));
  return {static_cast<int64_t>(slots_.size()) - 1};
}

void Parameters::allocate(Device device, DType dtype, bool training) {
  device_ = device, dtype_ = dtype, training_ = training;
  for (const bool matrices : {true, false}) {
    for (Piece& slot : slots_) {
      if (slot.matrix != matrices) continue;
      slot.offset = size_;
      for (int64_t i = slot.first; i < slot.first + slot.count; ++i)
        list_[static_cast<size_t>(i)].offset += size_;
      size_ += (slot.shape.numel() + 63) / 64 * 64;
    }
    if (matrices) decayed_ = size_;
  }
  const size_t acc_bytes = static_cast<size_t>(size_ * size_of(acc_of(dtype)));
  const auto zeroed = [&](size_t bytes) {
    Buffer buffer(device, bytes);
    fill_bytes(device, buffer.data(), 0, bytes);
    return buffer;
  };
  masters_ = zeroed(acc_bytes);
  if (dtype == DType::bf16) copies_ = zeroed(static_cast<size_t>(size_) * 2);
  if (!training) return;
  grads_ = zeroed(acc_bytes);
  moments1_ = zeroed(acc_bytes);
  moments2_ = zeroed(acc_bytes);
}

void Parameters::train_only(const std::vector<std::string>& words) {
  bool any = false;
  for (Parameter& p : list_) {
    const auto named = [&](const std::string& word) { return p.name.find(word) != std::string::npos; };
    p.frozen = std::none_of(words.begin(), words.end(), named);
    any = any || !p.frozen;
  }
  PRISM_CHECK(any, "--train-only: expected a part of a weight's name, got ", words.empty() ? "" : words[0]);
}

std::vector<Parameters::Range> Parameters::ranges(bool frozen) const {
  std::vector<const Parameter*> sorted;
  for (const Parameter& p : list_) sorted.push_back(&p);
  std::sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->offset < b->offset; });
  std::vector<Range> ranges;
  bool open = false;  // whether the last range may go on: nothing of the other kind came since
  for (size_t i = 0; i < sorted.size(); ++i) {
    const Parameter& p = *sorted[i];
    const bool ours = p.frozen == frozen;
    const int64_t end =
        i + 1 < sorted.size() ? sorted[i + 1]->offset : size_;  // with the padding, which stays 0
    if (ours && open && ranges.back().decays == p.decays)
      ranges.back().end = end;
    else if (ours)
      ranges.push_back({p.offset, end, p.decays});
    open = ours;
  }
  return ranges;
}

void Parameters::initialise(uint64_t seed) {
  for (const Parameter& p : list_) {
    const uint64_t stream = stream_of(p.name);
    const Tensor to = master(p);
    dispatch(to.dtype, [&]<class T>(Tag<T>) {
      std::vector<T> host(static_cast<size_t>(p.shape.numel()));
      parallel_tiles(static_cast<int64_t>(host.size()), 65536, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          host[static_cast<size_t>(i)] =
              T(static_cast<acc_t<T>>(draw(p.init, seed, stream, static_cast<uint64_t>(i))));
      });
      copy_in(device_, to.data, host.data(), to.bytes());
    });
  }
  refresh_copies();
}

void Parameters::refresh_copies() {
  if (dtype_ == DType::bf16) cast<bf16>(device_, copies().ptr<bf16>(), masters().ptr<float>(), size_);
}

const Parameter* Parameters::find(const std::string& name) const {
  for (const Parameter& p : list_)
    if (p.name == name) return &p;
  return nullptr;
}

Tensor Parameters::view(const Buffer& buffer, const Parameter& p) const {
  const DType type = acc_of(dtype_);
  return {buffer.data() + p.offset * size_of(type), p.shape, type, device_};
}

Tensor Parameters::value(Slot slot) const {
  if (!slot) return {};
  const Piece& s = slots_[static_cast<size_t>(slot.index)];
  const bool copy = s.matrix && dtype_ == DType::bf16;
  const DType type = copy ? DType::bf16 : acc_of(dtype_);
  return {(copy ? copies_ : masters_).data() + s.offset * size_of(type), s.shape, type, device_};
}

Tensor Parameters::grad(Slot slot) const {
  if (!slot || !training_) return {};
  const Piece& s = slots_[static_cast<size_t>(slot.index)];
  bool frozen = s.matrix;
  for (int64_t i = s.first; i < s.first + s.count; ++i)
    frozen = frozen && list_[static_cast<size_t>(i)].frozen;
  if (frozen) return {};
  const DType type = acc_of(dtype_);
  return {grads_.data() + s.offset * size_of(type), s.shape, type, device_};
}

int64_t Parameters::count() const {
  int64_t n = 0;
  for (const Parameter& p : list_) n += p.shape.numel();
  return n;
}

size_t Parameters::bytes() const {
  return masters_.bytes() + grads_.bytes() + moments1_.bytes() + moments2_.bytes() + copies_.bytes();
}

}  // namespace prism
