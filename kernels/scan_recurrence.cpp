// The scan as its definition: one token after another, plain loops. Tests hold every other form to it.
#include <cmath>
#include <vector>

#include "kernels/scan.h"
#include "tensor/parallel.h"

namespace prism::cpu {
namespace {

// One head's view of the arguments. Token t's rows; the write keys by l = 1..L.
template <class T>
struct HeadRows {
  const ScanArgs<T>& in;
  int64_t b, h;

  HeadRows(const ScanArgs<T>& args, int64_t i) : in(args), b(i / args.H), h(i % args.H) {}

  int64_t token(int64_t t) const { return (b * in.T_len + t) * in.H + h; }
  int64_t write(int64_t t, int64_t l) const { return ((b * in.T_len + t) * in.L + l - 1) * in.H + h; }
  // kappa_{t,l} in `kappa`, or k_t in `k` when the first write shares the erase key.
  template <class P>
  P* key(P* k, P* kappa, int64_t t, int64_t l) const {
    const int64_t m = l - 2 + in.own_first_key;
    if (m < 0) return k + token(t) * in.K;
    return kappa + (((b * in.T_len + t) * in.extra_keys() + m) * in.H + h) * in.K;
  }
  T alpha(int64_t t) const { return in.g ? std::exp(in.g[token(t)]) : T(1); }
  T beta(int64_t t) const { return in.beta ? in.beta[token(t)] : T(0); }
  bool opens_document(int64_t t) const { return in.start && t > 0 && in.start[b * in.T_len + t] == t; }
};

// y = S x over V rows, or y = S^T x over K columns.
template <class T>
void multiply(T* y, const T* S, const T* x, int64_t V, int64_t K) {
  for (int64_t v = 0; v < V; ++v) {
    y[v] = 0;
    for (int64_t c = 0; c < K; ++c) y[v] += S[v * K + c] * x[c];
  }
}
template <class T>
void multiply_transposed_add(T* y, T scale, const T* S, const T* x, int64_t V, int64_t K) {
  for (int64_t v = 0; v < V; ++v)
    for (int64_t c = 0; c < K; ++c) y[c] += scale * S[v * K + c] * x[v];
}
// S += scale x y^T
template <class T>
void add_outer(T* S, T scale, const T* x, const T* y, int64_t V, int64_t K) {
  for (int64_t v = 0; v < V; ++v)
    for (int64_t c = 0; c < K; ++c) S[v * K + c] += scale * x[v] * y[c];
}
template <class T>
T dot(const T* x, const T* y, int64_t n) {
  T sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

// The states of one head: `after(t)` token t, and what token t finds, `before(t)`: S_{t-1}, or 0 where a
// document opens.
template <class T>
struct States {
  const HeadRows<T>& head;
  int64_t VK;
  std::vector<T> zero, all;

  explicit States(const HeadRows<T>& h) : head(h), VK(h.in.V * h.in.K), zero(VK), all((h.in.T_len + 1) * VK) {
    if (h.in.initial_state) std::copy_n(h.in.initial_state + (h.b * h.in.H + h.h) * VK, VK, all.data());
  }
  T* after(int64_t t) { return all.data() + (t + 1) * VK; }
  const T* before(int64_t t) { return head.opens_document(t) ? zero.data() : after(t - 1); }
};

template <class T>
States<T> recur(const HeadRows<T>& head) {
  const ScanArgs<T>& in = head.in;
  const int64_t K = in.K, V = in.V, VK = V * K;
  States<T> states(head);
  std::vector<T> recalled(V);
  for (int64_t t = 0; t < in.T_len; ++t) {
    const T* before = states.before(t);
    T* S = states.after(t);
    const T alpha = head.alpha(t);
    for (int64_t i = 0; i < VK; ++i) S[i] = alpha * before[i];
    if (in.beta) {
      const T* k = in.k + head.token(t) * K;
      multiply(recalled.data(), before, k, V, K);
      add_outer(S, -alpha * head.beta(t), recalled.data(), k, V, K);
    }
    for (int64_t l = 1; l <= in.L; ++l)
      add_outer(S, T(1), in.w + head.write(t, l) * V, head.key(in.k, in.kappa, t, l), V, K);
  }
  return states;
}

}  // namespace

template <class T>
void scan_recurrence_forward(const ScanArgs<T>& args) {
  parallel_for(args.B * args.H, [&](int64_t i) {
    const HeadRows<T> head(args, i);
    const int64_t K = args.K, V = args.V, VK = V * K;
    States<T> states = recur(head);
    for (int64_t t = 0; t < args.T_len; ++t)
      multiply(args.o + head.token(t) * V, states.after(t), args.q + head.token(t) * K, V, K);
    if (args.final_state) std::copy_n(states.after(args.T_len - 1), VK, args.final_state + i * VK);
  });
}

// The reverse of each line of S_t = alpha (S' - beta (S' k) k^T) + sum_l w_l kappa_l^T, S' = S_{t-1}, last
// token first; dS is the gradient of S_t, then of S_{t-1}.
template <class T>
void scan_recurrence_backward(const ScanArgs<T>& args, const ScanGrads<T>& grads) {
  parallel_for(args.B * args.H, [&](int64_t i) {
    const HeadRows<T> head(args, i);
    const int64_t K = args.K, V = args.V, VK = V * K;
    States<T> states = recur(head);
    std::vector<T> dS(VK), recalled(V), r(V);
    if (grads.dfinal_state) std::copy_n(grads.dfinal_state + i * VK, VK, dS.data());
    for (int64_t t = args.T_len - 1; t >= 0; --t) {
      const int64_t at = head.token(t);
      const T *before = states.before(t), *S = states.after(t), *d_o = grads.d_o + at * V;
      T *dq = grads.dq + at * K, *dk = grads.dk ? grads.dk + at * K : nullptr;
      std::fill_n(dq, K, T(0));
      if (dk) std::fill_n(dk, K, T(0));
      multiply_transposed_add(dq, T(1), S, d_o, V, K);
      add_outer(dS.data(), T(1), d_o, args.q + at * K, V, K);
      for (int64_t l = 1; l <= args.L; ++l) {
        T* dkey = head.key(grads.dk, grads.dkappa, t, l);
        multiply(grads.dw + head.write(t, l) * V, dS.data(), head.key(args.k, args.kappa, t, l), V, K);
        if (l > 1 || args.own_first_key) std::fill_n(dkey, K, T(0));
        multiply_transposed_add(dkey, T(1), dS.data(), args.w + head.write(t, l) * V, V, K);
      }
      const T alpha = head.alpha(t), beta = head.beta(t);
      T dalpha = dot(dS.data(), before, VK);
      if (args.beta) {
        const T* k = args.k + at * K;
        multiply(recalled.data(), before, k, V, K);
        multiply(r.data(), dS.data(), k, V, K);
        const T overlap = dot(r.data(), recalled.data(), V);
        dalpha -= beta * overlap;
        grads.dbeta[at] = -alpha * overlap;
        multiply_transposed_add(dk, -alpha * beta, before, r.data(), V, K);
        multiply_transposed_add(dk, -alpha * beta, dS.data(), recalled.data(), V, K);
        add_outer(dS.data(), -beta, r.data(), k, V, K);
      }
      if (args.g) grads.dg[at] = alpha * dalpha;
      for (T& d : dS) d *= alpha;
      if (head.opens_document(t)) std::fill(dS.begin(), dS.end(), T(0));
    }
    if (grads.dinitial_state) std::copy_n(dS.data(), VK, grads.dinitial_state + i * VK);
  });
}

PRISM_ON_CPU(scan_recurrence_forward);
PRISM_ON_CPU(scan_recurrence_backward);

}  // namespace prism::cpu
