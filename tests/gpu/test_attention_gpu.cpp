// Attention on the card against the CPU in double: both kernels, every width, length, document and cache.
#include "kernels/attention.h"
#include "kernels/documents.h"
#include "tests/gpu/memory.h"

using namespace prism;

namespace {

struct Case {
  int64_t B, T, H, W;
  int64_t document = 0;            // about so many tokens each; 0: one a row
  std::vector<int32_t> past = {};  // of each row; empty: no cache
};

std::vector<int32_t> starts(const Case& c) {
  std::vector<int32_t> segment(static_cast<size_t>(c.B * c.T)), start(segment.size());
  int32_t id = 0;
  for (size_t i = 0; i < segment.size(); ++i)
    segment[i] = id += random_below(static_cast<uint64_t>(c.document), 11, 0, i) == 0;
  document_starts(start.data(), segment.data(), c.B, c.T);
  return start;
}

template <class T>
void attend(Memory& m, const Case& c) {
  const int64_t n = c.B * c.T, columns = c.H * c.W;
  AttentionArgs<T> a;
  a.B = c.B, a.T_len = c.T, a.H = c.H, a.W = c.W;
  a.o = m.store<T>("o", Use::out, n * columns), a.lse = m.acc<T>("lse", Use::out, n * c.H);
  // As one tensor: where a document has one token, dq and dk are 0.
  const Rows<T> qkv = m.rows<T>("qkv", Use::in, n, 3 * columns, -2, 2);
  const auto part = [&](Rows<T> x, int64_t i) { return Rows<T>{x.data + i * columns, x.stride}; };
  a.q = part(qkv, 0), a.k = part(qkv, 1), a.v = part(qkv, 2);
  if (c.document) a.start = m.copy_of(starts(c));
  if (!c.past.empty()) {
    a.cache.capacity = *std::max_element(c.past.begin(), c.past.end()) + c.T + 3;
    a.cache.keys = m.store<T>("keys", Use::inout, c.B * a.cache.capacity * columns, -2, 2);
    a.cache.values = m.store<T>("values", Use::inout, c.B * a.cache.capacity * columns);
    a.cache.past = m.copy_of(c.past);
  }
  attention_forward<T>(m.device(), a);
  if (a.cache.keys) return;
  const Rows<T> dqkv = m.rows<T>("dqkv", Use::out, n, 3 * columns);
  AttentionGrads<T> g;
  g.dq = part(dqkv, 0), g.dk = part(dqkv, 1), g.dv = part(dqkv, 2);
  g.d_o = m.store<T>("d_o", Use::in, n * columns), g.delta = m.acc<T>("delta", Use::scratch, n * c.H);
  attention_backward<T>(m.device(), a, g);
}

}  // namespace

TEST_CASE("attention: forward, backward and the cache, by the simple and the fast kernels") {
  const std::vector<Case> cases = {{1, 1, 1, 64},
                                   {2, 63, 3, 64},
                                   {1, 64, 2, 128},
                                   {2, 65, 3, 64},
                                   {1, 131, 2, 128},
                                   {2, 300, 2, 64, 40},
                                   {1, 300, 2, 128, 40},
                                   {1, 1000, 1, 64},
                                   {1, 700, 1, 128, 3},
                                   {1, 700, 1, 64, 200},
                                   {2, 130, 2, 24, 20},
                                   {1, 70, 1, 256},
                                   {1, 40, 2, 10, 9},
                                   {2, 1, 3, 64, 0, {0, 77}},
                                   {2, 100, 2, 128, 30, {64, 1}},
                                   {1, 64, 2, 64, 0, {64}},
                                   {2, 257, 2, 64, 100, {0, 130}},
                                   {1, 20, 1, 48, 7, {5}}};
  for (const KernelChoice choice : {KernelChoice::simple, KernelChoice::fast})
    for (const Case& c : cases) {
      if (kSmall && c.B * c.T > 300) continue;  // documents on the fast kernels still among them
      const KernelChoice before = std::exchange(kernel_choice, choice);
      compare_with_cpu(
          choice == KernelChoice::fast ? "attention, fast" : "attention, simple",
          cat(c.B, "x", c.T, " H ", c.H, " W ", c.W, " documents ", c.document, " cache ", c.past.size()),
          [&](auto tag, Memory& m) { attend<typename decltype(tag)::type>(m, c); });
      kernel_choice = before;
    }
}

TEST_CASE("rotary: forward and inverse, with documents and a past") {
  for (const Case& c : {Case{2, 70, 3, 64, 20, {0, 5000}}, {1, 300, 1, 128}, {1, 9, 2, 10, 4, {3}}})
    for (const bool inverse : {false, true})
      compare_with_cpu("rotary", cat(c.B, "x", c.T, " W ", c.W), [&](auto tag, Memory& m) {
        using T = typename decltype(tag)::type;
        RotaryArgs<T> r;
        r.x = m.rows<T>("x", Use::inout, c.B * c.T, c.H * c.W);
        if (c.document) r.start = m.copy_of(starts(c));
        if (!c.past.empty()) r.past = m.copy_of(c.past);
        r.B = c.B, r.T_len = c.T, r.heads = c.H, r.W = c.W, r.inverse = inverse;
        rotary<T>(m.device(), r);
      });
}
