// Test-time training of a two-layer memory, token by token: kernels/README.md derives the reverse pass and
// uses these names. One task is one head of one batch row.
#include "kernels/ttt.h"

#include "kernels/eigen.h"
#include "tensor/parallel.h"

namespace prism::cpu {
namespace {

template <class A>
using Vector = Eigen::Matrix<A, Eigen::Dynamic, 1>;
template <class A>
using View = Eigen::Map<Vector<A>>;
template <class A>
using ConstView = Eigen::Map<const Vector<A>>;

// Sums in a fixed order, whatever the addresses.
template <class X, class Y>
auto dot(const X& x, const Y& y) {
  typename X::Scalar sum = 0;
  for (int64_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}
template <class X>
auto mean(const X& x) {
  typename X::Scalar sum = 0;
  for (int64_t i = 0; i < x.size(); ++i) sum += x[i];
  return sum / static_cast<typename X::Scalar>(x.size());
}

// The weights of one head's memory, or their gradients.
template <class A>
struct Memory {
  int64_t K, M;
  std::vector<A> all;
  Eigen::Map<Matrix<A>> W1, W2;
  View<A> b1, b2;

  Memory(int64_t k, int64_t m)
      : K(k),
        M(m),
        all(static_cast<size_t>(2 * k * m + k + m)),
        W1(all.data(), m, k),
        W2(all.data() + m * k + m, k, m),
        b1(all.data() + m * k, m),
        b2(all.data() + 2 * m * k + m, k) {}
  template <class T>
  void initialise(const TttArgs<T>& in, int64_t h) {
    for (int64_t j = 0; j < in.P(); ++j) all[static_cast<size_t>(j)] = in.initial_weight(h, j);
  }
  // Adds `scale` times the gradient that e and f, of W2 x1 + b2 and W1 k + b1, mean for the weights.
  template <class E, class F, class X, class Key>
  void add(A scale, const E& e, const X& x1, const F& f, const Key& k) {
    W2.noalias() += (scale * e) * x1.transpose();
    W1.noalias() += (scale * f) * k.transpose();
    b2 += scale * e, b1 += scale * f;
  }
};

// zhat = (z - mean) r, r = 1 / sqrt(var + eps); returns r.
template <class A, class Out>
A normalise(Out& zhat, const Vector<A>& z, A eps) {
  zhat = z.array() - mean(z);
  const A r = 1 / std::sqrt(dot(zhat, zhat) / static_cast<A>(z.size()) + eps);
  zhat *= r;
  return r;
}
// r (x - mean(x) - zhat mean(x zhat)): the derivative of zhat by z, symmetric, applied to x.
template <class A, class Z>
Vector<A> through_norm(const Vector<A>& x, const Z& zhat, A r) {
  const A along = dot(x, zhat) / static_cast<A>(x.size());
  return r * ((x.array() - mean(x)).matrix() - along * zhat);
}

template <class A, class Fn>
Vector<A> each(const Vector<A>& z, const Fn& fn) {
  return z.unaryExpr([&](A x) { return fn(Gelu<A>(x)); });
}
template <class A>
Vector<A> gelu(const Vector<A>& z) {
  return each(z, [](const Gelu<A>& g) { return g.value; });
}
template <class A>
Vector<A> slope(const Vector<A>& z) {
  return each(z, [](const Gelu<A>& g) { return g.slope; });
}

// What a token leaves for the reverse pass, in the record or in memory of its own.
template <class A>
struct Token {
  View<A> z1, h, a1, zhat, ahat, e;
  A &r_z, &r_a;
  Token(A* at, int64_t K, int64_t M)
      : z1(at, M),
        h(at + M, M),
        a1(at + 2 * M, M),
        zhat(at + 3 * M, K),
        ahat(at + 3 * M + K, K),
        e(at + 3 * M + 2 * K, K),
        r_z(at[3 * M + 3 * K]),
        r_a(at[3 * M + 3 * K + 1]) {}
};

// One head's rows of the arguments.
template <class T>
struct HeadRows {
  const TttArgs<T>& in;
  int64_t i, b, h;
  ConstView<T> gamma, bias;
  HeadRows(const TttArgs<T>& args, int64_t at)
      : in(args),
        i(at),
        b(at / args.H),
        h(at % args.H),
        gamma(args.norm_weight + h * args.K, args.K),
        bias(args.norm_bias + h * args.K, args.K) {}
  int64_t token(int64_t t) const { return (b * in.T_len + t) * in.H + h; }
  template <class P>
  auto row(P* x, int64_t t) const {
    return Eigen::Map<std::conditional_t<std::is_const_v<P>, const Vector<T>, Vector<T>>>(x + token(t) * in.K,
                                                                                          in.K);
  }
  T eta(int64_t t) const { return in.rate * in.beta[token(t)]; }
  Token<T> record(int64_t t) const { return {in.record + (i * in.T_len + t) * in.R(), in.K, in.M}; }
};

}  // namespace

template <class T>
void ttt_forward(const TttArgs<T>& args) {
  parallel_for(args.B * args.H, [&](int64_t i) {
    const HeadRows<T> head(args, i);
    Memory<T> w(args.K, args.M);
    std::vector<T> own(static_cast<size_t>(args.R()));
    for (int64_t t = 0; t < args.T_len; ++t) {
      if (args.opens_document(head.b, t)) w.initialise(args, head.h);
      for (int64_t j = 0; t == 0 && args.initial_state && j < args.P(); ++j)
        w.all[static_cast<size_t>(j)] += args.initial_state[i * args.P() + j];
      Token<T> x = args.record ? head.record(t) : Token<T>(own.data(), args.K, args.M);
      const auto q = head.row(args.q, t), k = head.row(args.k, t), v = head.row(args.v, t);
      const Vector<T> z1 = w.W1 * k + w.b1, x1 = gelu(z1), z2 = w.W2 * x1 + w.b2;
      x.z1 = z1, x.r_z = normalise(x.zhat, z2, args.eps);
      const Vector<T> p = head.gamma.cwiseProduct(head.gamma.cwiseProduct(x.zhat) + head.bias + k - v);
      x.e = through_norm(p, x.zhat, x.r_z);
      x.h = w.W2.transpose() * x.e;
      const Vector<T> f = x.h.cwiseProduct(slope(z1));
      w.add(-head.eta(t), x.e, x1, f, k);
      const Vector<T> a1 = w.W1 * q + w.b1, a2 = w.W2 * gelu(a1) + w.b2;
      x.a1 = a1, x.r_a = normalise(x.ahat, a2, args.eps);
      if (args.o) head.row(args.o, t) = q + head.gamma.cwiseProduct(x.ahat) + head.bias;
    }
    for (int64_t j = 0; args.final_state && j < args.P(); ++j)
      args.final_state[i * args.P() + j] = w.all[static_cast<size_t>(j)] - args.initial_weight(head.h, j);
  });
}

template <class T>
void ttt_backward(const TttArgs<T>& args, const TttGrads<T>& grads) {
  TttArgs<T> recording = args;
  recording.o = nullptr, recording.final_state = grads.last_state;
  ttt_forward(recording);
  const int64_t K = args.K, M = args.M, P = args.P(), Q = P + 2 * K;
  parallel_for(args.B * args.H, [&](int64_t i) {
    const HeadRows<T> head(args, i);
    Memory<T> w(K, M), D(K, M);  // the weights after a token, then before it; their gradient
    View<T> dW0(grads.partial + i * Q, P), dgamma(grads.partial + i * Q + P, K),
        dbias(grads.partial + i * Q + P + K, K);
    dW0.setZero(), dgamma.setZero(), dbias.setZero();
    for (int64_t t = args.T_len - 1; t >= 0; --t) {
      if (t == args.T_len - 1) {
        w.initialise(args, head.h);
        for (int64_t j = 0; j < P; ++j) w.all[static_cast<size_t>(j)] += grads.last_state[i * P + j];
      } else if (args.opens_document(head.b, t + 1)) {
        // The last token of a document: its weights come from the writes, which the record has.
        w.initialise(args, head.h);
        const int64_t first = args.start ? args.start[head.b * args.T_len + t] : 0;
        for (int64_t j = 0; first == 0 && args.initial_state && j < P; ++j)
          w.all[static_cast<size_t>(j)] += args.initial_state[i * P + j];
        for (int64_t s = first; s <= t; ++s) {
          const Token<T> x = head.record(s);
          const Vector<T> z1 = x.z1, f = x.h.cwiseProduct(slope(z1));
          w.add(-head.eta(s), x.e, gelu(z1), f, head.row(args.k, s));
        }
      }
      const Token<T> x = head.record(t);
      const auto q = head.row(args.q, t), k = head.row(args.k, t), v = head.row(args.v, t);
      const T eta = head.eta(t);
      // The read, o = q + gamma ahat + bias.
      const Vector<T> d_o = head.row(grads.d_o, t), a1 = x.a1;
      const Vector<T> da2 = through_norm(Vector<T>(head.gamma.cwiseProduct(d_o)), x.ahat, x.r_a);
      const Vector<T> da1 = (w.W2.transpose() * da2).cwiseProduct(slope(a1));
      head.row(grads.dq, t) = d_o + w.W1.transpose() * da1;
      dgamma += d_o.cwiseProduct(x.ahat), dbias += d_o;
      D.add(1, da2, gelu(a1), da1, q);
      // The write, W = W_before - eta (e x1^T, f k^T).
      const Vector<T> z1 = x.z1, x1 = gelu(z1), g1 = slope(z1), h = x.h, f = h.cwiseProduct(g1);
      w.add(eta, x.e, x1, f, k);
      const Vector<T> D2x = D.W2 * x1 + D.b2, D1k = D.W1 * k + D.b1;
      grads.dbeta[head.token(t)] = -args.rate * (dot(x.e, D2x) + dot(f, D1k));
      const Vector<T> df = -eta * D1k, dh = df.cwiseProduct(g1);
      const Vector<T> u = w.W2 * dh - eta * D2x;  // the gradient of e
      // e = r_z (p - mean(p) - zhat mean(p zhat)), p = gamma d, d = gamma zhat + bias + k - v.
      const T n = static_cast<T>(K);
      const Vector<T> d = head.gamma.cwiseProduct(x.zhat) + head.bias + k - v, p = head.gamma.cwiseProduct(d);
      const Vector<T> dp = through_norm(u, x.zhat, x.r_z), dd = head.gamma.cwiseProduct(dp);
      const Vector<T> dzhat =
          head.gamma.cwiseProduct(dd) - x.r_z / n * (dot(p, x.zhat) * u + dot(u, x.zhat) * p);
      const Vector<T> dz2 = through_norm(dzhat, x.zhat, x.r_z) - x.r_z / n * dot(u, x.e) * x.zhat;
      dgamma += dp.cwiseProduct(d) + dd.cwiseProduct(x.zhat), dbias += dd;
      const Vector<T> dx1 = w.W2.transpose() * dz2 - eta * (D.W2.transpose() * x.e);
      const Vector<T> bend = each(z1, [](const Gelu<T>& g) { return g.bend; });
      const Vector<T> dz1 = df.cwiseProduct(h).cwiseProduct(bend) + dx1.cwiseProduct(g1);
      head.row(grads.dv, t) = -dd;
      head.row(grads.dk, t) = dd + w.W1.transpose() * dz1 - eta * (D.W1.transpose() * f);
      D.add(1, dz2, x1, dz1, k);
      D.W2.noalias() += x.e * dh.transpose();
      if (!args.opens_document(head.b, t)) continue;
      dW0 += View<T>(D.all.data(), P);
      std::fill(D.all.begin(), D.all.end(), T(0));
    }
  });
  for (int64_t i = 0; i < args.B * args.H; ++i)
    for (int64_t j = 0; j < Q; ++j)
      if (T* const to = grads.target(i % args.H, j, K, M)) *to += grads.partial[i * Q + j];
}

PRISM_ON_CPU(ttt_forward);
PRISM_ON_CPU(ttt_backward);

}  // namespace prism::cpu
