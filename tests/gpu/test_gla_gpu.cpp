// Gated linear attention on the card against the CPU in double.
#include "kernels/documents.h"
#include "kernels/gla.h"
#include "tests/gpu/memory.h"

using namespace prism;

TEST_CASE("gla: forward and backward for every width, with documents and states, also in place") {
  struct Case {
    int64_t B, T, H, K, V;
    bool documents, state;
  };
  std::vector<Case> cases = {{2, 1, 2, 8, 16, false, true}, {1, 37, 2, 40, 24, true, false}};
  if (!kSmall)
    cases.insert(cases.end(), {{2, 65, 3, 64, 128, true, true},
                               {1, 131, 2, 128, 256, true, false},
                               {1, 70, 1, 256, 512, false, true},
                               {2, 33, 2, 5, 11, true, true},
                               {1, 2, 1, 1, 1, false, false},
                               {3, 20, 2, 96, 48, false, false}});
  for (const Case& c : cases)
    compare_with_cpu("gla", cat(c.B, "x", c.T, "x", c.H, " K ", c.K, " V ", c.V), [&](auto tag, Memory& m) {
      using T = typename decltype(tag)::type;
      const int64_t keys = c.B * c.T * c.H * c.K, values = c.B * c.T * c.H * c.V, S = c.B * c.H * c.V * c.K;
      GlaArgs<T> a;
      a.B = c.B, a.T_len = c.T, a.H = c.H, a.K = c.K, a.V = c.V;
      a.o = m.store<T>("o", Use::out, values), a.q = m.store<T>("q", Use::in, keys);
      a.k = m.store<T>("k", Use::in, keys), a.y = m.store<T>("y", Use::in, keys, -20, 8);
      a.w = m.store<T>("w", Use::in, values), a.alpha = m.acc<T>("alpha", Use::scratch, keys);
      if (c.documents) {
        std::vector<int32_t> segment(static_cast<size_t>(c.B * c.T)), start(segment.size());
        for (size_t i = 1; i < segment.size(); ++i)
          segment[i] = segment[i - 1] + (random_below(9, 11, 0, i) == 0);
        document_starts(start.data(), segment.data(), c.B, c.T);
        a.start = m.copy_of(start);
      }
      if (c.state) {
        a.initial_state = m.acc<T>("state", Use::in, S), a.final_state = m.acc<T>("final", Use::out, S);
        auto in_place = a;
        in_place.o = m.store<T>("second o", Use::out, values);
        in_place.initial_state = in_place.final_state = m.acc<T>("moved", Use::inout, S);
        gla_forward<T>(m.device(), in_place);
      }
      gla_forward<T>(m.device(), a);
      GlaGrads<T> g;
      g.dq = m.store<T>("dq", Use::out, keys), g.dk = m.store<T>("dk", Use::out, keys);
      g.dy = m.store<T>("dy", Use::out, keys), g.dw = m.store<T>("dw", Use::out, values);
      g.dq_sum = m.acc<T>("dq_sum", Use::scratch, keys), g.dk_sum = m.acc<T>("dk_sum", Use::scratch, keys);
      g.d_o = m.store<T>("d_o", Use::in, values);
      gla_backward<T>(m.device(), a, g);
    });
}
