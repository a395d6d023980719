// The scan in chunks of C tokens, forward and reverse: kernels/README.md derives every line and uses its
// names. One task is one head of one batch row; it walks that head's chunks in order.
#include "kernels/scan.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/eigen.h"

namespace prism::cpu {
namespace {

using Index = int64_t;
template <class T>
using Vector = Eigen::Array<T, Eigen::Dynamic, 1>;
template <class T>
using Strided = Eigen::Map<Matrix<T>, 0, Eigen::OuterStride<>>;
template <class T>
using State = Eigen::Map<Matrix<T>>;  // [V, K]
template <class T>
using ConstStrided = Eigen::Map<const Matrix<T>, 0, Eigen::OuterStride<>>;

constexpr Index kTile = 8;  // rows a triangular solve takes by substitution between its matrix products

// What both passes hold of one chunk of n tokens of one head. A token reads the state twice: by q after its
// own writes and, to erase, by k before them. It writes m times, each distinct key once.
template <class T>
struct Chunk {
  const ScanArgs<T>& in;
  const Index b, h;      // batch row, head
  const Index m;         // keys a token writes to
  const Index r;         // reads a token makes: 2 with erasure, else 1
  const Index lead;      // keys before that of w_1: 1 when k erases and nothing else
  const bool keeps_k;    // k is among the keys
  Index c0 = 0, n = 0;   // first token, tokens
  Matrix<T> rows;        // [(1 + m) n, K]  q; k; kappa. The first r n rows read, all but the first n are keys
  Matrix<T> reads_a;     // [r n, K]  the reads times a, as the state before the chunk sees them
  Matrix<T> keys_b;      // [m n, K]  the keys times b, as the state after the chunk sees them
  Matrix<T> U;           // [m n, V]  values written: U_0 = w_1 - beta E for the key k, else w_l
  Matrix<T> results;     // [r n, V]  o; E: what the reads find. E_i = alpha_i S_{i-1} k_i
  Matrix<T> Gamma;       // [n, n]    decay from token j to token i
  Matrix<T> scores;      // [r n, m n] Gamma . (reads keys^T); for k's reads without the diagonal
  Vector<T> a, b_decay;  // [n]  decay from before the chunk to token i; from token j to the chunk's end
  Vector<T> beta;        // [n]

  Chunk(const ScanArgs<T>& args, Index head)
      : in(args),
        b(head / args.H),
        h(head % args.H),
        m(args.extra_keys() + (args.beta || !args.own_first_key)),
        r(args.beta ? 2 : 1),
        lead(m - args.L),
        keeps_k(m > args.extra_keys()) {
    const Index C = std::min(in.C, in.T_len);
    rows.resize((1 + m) * C, in.K), reads_a.resize(r * C, in.K), keys_b.resize(m * C, in.K);
    U.resize(m * C, in.V), results.resize(r * C, in.V), Gamma.setZero(C, C), scores.resize(r * C, m * C);
    a.resize(C), b_decay.resize(C), beta.resize(C);
  }

  // This chunk's rows of entry `i` of `count` in a tensor [B,T,count,H,width].
  template <class P>
  auto slice(P* base, Index count, Index i, Index width) const {
    using Map = std::conditional_t<std::is_const_v<P>, ConstStrided<T>, Strided<T>>;
    return Map(base + (((b * in.T_len + c0) * count + i) * in.H + h) * width, n, width,
               Eigen::OuterStride<>(count * in.H * width));
  }

  auto reads() { return rows.topRows(r * n); }
  auto keys() { return rows.middleRows(n, m * n); }
  // Block i of n rows; block (read, key) of an [r n, m n] matrix.
  auto rows_of(Matrix<T>& x, Index i) { return x.middleRows(i * n, n); }
  auto block(Matrix<T>& x, Index read, Index key) { return x.block(read * n, key * n, n, n); }

  void load(Index chunk) {
    c0 = chunk * in.C, n = std::min(in.C, in.T_len - c0);
    rows_of(rows, 0) = slice(in.q, 1, 0, in.K);
    if (keeps_k) rows_of(rows, 1) = slice(in.k, 1, 0, in.K);
    for (Index i = 0; i < in.extra_keys(); ++i)
      rows_of(rows, 1 + keeps_k + i) = slice(in.kappa, in.extra_keys(), i, in.K);
    if (lead) rows_of(U, 0).setZero();
    for (Index l = 0; l < in.L; ++l) rows_of(U, lead + l) = slice(in.w, in.L, l, in.V);
    if (in.beta) beta.head(n) = slice(in.beta, 1, 0, 1).array();
    decay();
    for (Index i = 0; i < r; ++i) rows_of(reads_a, i) = rows_of(rows, i).array().colwise() * a.head(n);
    for (Index i = 0; i < m; ++i)
      rows_of(keys_b, i) = rows_of(rows, 1 + i).array().colwise() * b_decay.head(n);
  }

  // Gamma, a and b, from each token downwards: products of alphas, never differences of sums. What falls
  // under `least` counts as 0, for arithmetic on subnormal numbers is slow (30 times, here).
  void decay() {
    constexpr T least = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon();
    const int32_t* start = in.start ? in.start + b * in.T_len + c0 : nullptr;
    T from_before = 1;
    for (Index i = 0; i < n; ++i) {
      const T alpha = in.g ? std::exp(in.g[(b * in.T_len + c0 + i) * in.H + h]) : T(1);
      const Index first = start ? std::max<Index>(0, start[i] - c0) : 0;
      const auto decayed = [&](T x) { return alpha * x >= least ? alpha * x : T(0); };
      a(i) = from_before = start && start[i] >= std::max<Index>(c0, 1) ? T(0) : decayed(from_before);
      for (Index j = 0; j < first; ++j) Gamma(i, j) = 0;
      for (Index j = first; j < i; ++j) Gamma(i, j) = decayed(Gamma(i - 1, j));
      Gamma(i, i) = 1;
    }
    b_decay.head(n) = Gamma.row(n - 1).head(n).transpose().array();
  }

  // scores of reads [first, r).
  void score(Index first) {
    auto block_rows = scores.block(first * n, 0, (r - first) * n, m * n);
    block_rows.noalias() = rows.middleRows(first * n, (r - first) * n) * keys().transpose();
    for (Index read = first; read < r; ++read) mask(scores, read);
  }
  // Gamma . x in the blocks of one read; k_i does not see token i's own writes.
  void mask(Matrix<T>& x, Index read) {
    for (Index key = 0; key < m; ++key) {
      block(x, read, key).array() *= Gamma.topLeftCorner(n, n).array();
      if (read == 1) block(x, read, key).diagonal().setZero();
    }
  }

  // results of reads [first, r): a . (reads S^T) + scores U. Turns U_0 from w_1 into w_1 - beta E on the way.
  void read(const State<T>& S, Index first) {
    const Index from = first * n, count = (r - first) * n;
    auto result = results.middleRows(from, count);
    if (n > 1)
      result.noalias() = reads_a.middleRows(from, count) * S.transpose();
    else  // a decoding step: matrix times vector, for packing S would take longer than using it
      for (Index i = from; i < r; ++i) results.row(i).noalias() = reads_a.row(i) * S.transpose();
    const Index known = in.beta ? 1 : 0;  // key blocks from here on have their values already
    if (m > known)
      result.noalias() +=
          scores.block(from, known * n, count, (m - known) * n) * U.middleRows(known * n, (m - known) * n);
    if (!in.beta) return;
    substitute();
    if (first == 0) rows_of(results, 0).noalias() += block(scores, 0, 0) * rows_of(U, 0);
  }

  // E_i += sum_{j<i} N_ij U_j,  U_i = w_i - beta_i E_i,  N the scores of k with itself.
  void substitute() {
    auto E = rows_of(results, 1);
    auto U0 = rows_of(U, 0);
    const auto N = block(scores, 1, 0);
    for (Index t = 0; t < n; t += kTile) {
      const Index end = std::min(n, t + kTile);
      E.middleRows(t, end - t).noalias() += N.block(t, 0, end - t, t) * U0.topRows(t);
      for (Index i = t; i < end; ++i) {
        for (Index j = t; j < i; ++j) E.row(i) += N(i, j) * U0.row(j);
        U0.row(i) -= beta(i) * E.row(i);
      }
    }
  }

  // next = a_n S + U^T keys_b; next may be S.
  void write(const State<T>& S, State<T> next) {
    next = a(n - 1) * S;
    if (n > 1)
      next.noalias() += U.topRows(m * n).transpose() * keys_b.topRows(m * n);
    else
      for (Index i = 0; i < m; ++i) next.noalias() += U.row(i).transpose() * keys_b.row(i);
  }
};

// One head's state in `memory` [B,H,V,K], or in `own` where that is null, with the value of `from`, or 0.
template <class T>
State<T> state_of(Index head, const ScanArgs<T>& args, T* memory, const T* from, Matrix<T>& own) {
  const Index size = args.V * args.K;
  if (!memory) own.resize(args.V, args.K);
  State<T> S(memory ? memory + head * size : own.data(), args.V, args.K);
  if (!from)
    S.setZero();
  else if (from != memory)
    S = Eigen::Map<const Matrix<T>>(from + head * size, args.V, args.K);
  return S;
}

// The reverse pass of one head. dX is the gradient of X and has its shape.
template <class T>
struct Reverse : Chunk<T> {
  using Base = Chunk<T>;
  using Base::a, Base::b_decay, Base::beta, Base::block, Base::c0, Base::in, Base::keys, Base::keys_b,
      Base::m;
  using Base::mask, Base::n, Base::r, Base::reads, Base::reads_a, Base::rows_of, Base::scores, Base::slice;
  using Base::U;
  const ScanGrads<T>& grads;
  Matrix<T> dS_memory;
  State<T> dS;      // of the state after the chunk; `reverse` turns it into that of the state before
  Matrix<T> all_E;  // [T, V]  E of every chunk, kept from the walk forwards
  Matrix<T> dresults, dU, dscores, dreads, dkeys;
  Matrix<T> flow;                   // [n, n]  see decays()
  Vector<T> flow_before, crossing;  // [n]

  Reverse(const ScanArgs<T>& args, const ScanGrads<T>& g, Index head)
      : Base(args, head), grads(g), dS(state_of(head, args, g.dinitial_state, g.dfinal_state, dS_memory)) {
    const Index C = std::min(in.C, in.T_len);
    if (in.beta) all_E.resize(in.T_len, in.V);
    dresults.resize(r * C, in.V), dU.resize(m * C, in.V), dscores.resize(r * C, m * C);
    dreads.resize(r * C, in.K), dkeys.resize(m * C, in.K), flow.resize(C, C);
    flow_before.resize(C), crossing.resize(C);
  }

  auto E() { return all_E.middleRows(c0, n); }

  // One chunk, loaded; S is the state before it.
  void reverse(const State<T>& S) {
    Base::score(0);
    if (in.beta) rows_of(U, 0).array() -= E().array().colwise() * beta.head(n);
    values();
    auto scored = dscores.topLeftCorner(r * n, m * n);
    scored.noalias() = dresults.topRows(r * n) * U.topRows(m * n).transpose();
    dreads.topRows(r * n).noalias() = dresults.topRows(r * n) * S;
    dkeys.topRows(m * n).noalias() = U.topRows(m * n) * dS;
    if (in.g) decays(S);
    for (Index i = 0; i < r; ++i) {
      mask(dscores, i);
      rows_of(dreads, i).array().colwise() *= a.head(n);
    }
    for (Index i = 0; i < m; ++i) rows_of(dkeys, i).array().colwise() *= b_decay.head(n);
    dreads.topRows(r * n).noalias() += scored * keys();
    dkeys.topRows(m * n).noalias() += scored.transpose() * reads();
    dS *= a(n - 1);
    dS.noalias() += dresults.topRows(r * n).transpose() * reads_a.topRows(r * n);
    store();
  }

  // dU = keys_b dS^T + scores^T dresults, where the part of dresults for E, -beta dU_0, comes from dU itself.
  void values() {
    rows_of(dresults, 0) = slice(grads.d_o, 1, 0, in.V);
    auto all = dU.topRows(m * n);
    all.noalias() = keys_b.topRows(m * n) * dS.transpose();
    all.noalias() += scores.topLeftCorner(n, m * n).transpose() * rows_of(dresults, 0);
    if (!in.beta) return;
    substitute_back();
    if (m > 1)
      dU.middleRows(n, (m - 1) * n).noalias() +=
          scores.block(n, n, n, (m - 1) * n).transpose() * rows_of(dresults, 1);
    slice(grads.dbeta, 1, 0, 1) = -rows_of(dU, 0).cwiseProduct(E()).rowwise().sum();
  }
  // dU_j += sum_{i>j} N_ij dE_i,  dE_j = -beta_j dU_j, last token first.
  void substitute_back() {
    auto dE = rows_of(dresults, 1);
    auto dU0 = rows_of(dU, 0);
    const auto N = block(scores, 1, 0);
    for (Index t = (n - 1) / kTile * kTile; t >= 0; t -= kTile) {
      const Index end = std::min(n, t + kTile);
      dU0.middleRows(t, end - t).noalias() +=
          N.block(end, t, n - end, end - t).transpose() * dE.middleRows(end, n - end);
      for (Index j = end - 1; j >= t; --j) {
        for (Index i = j + 1; i < end; ++i) dU0.row(j) += N(i, j) * dE.row(i);
        dE.row(j) = -beta(j) * dU0.row(j);
      }
    }
  }

  // flow_ij is what the loss owes to token j's writes reaching token i's reads, in row n also the state
  // after; flow_before_i, to the state before reaching them. dg_t is all that crosses t: the sum over i >= t,
  // j < t. Nothing is subtracted, so the gradient of a decay that lets nothing through is exactly 0.
  void decays(const State<T>& S) {
    auto from_writes = flow.topLeftCorner(n, n);
    auto from_before = flow_before.head(n);
    from_writes.setZero(), from_before.setZero(), crossing.setZero();
    for (Index i = 0; i < r; ++i) {
      for (Index j = 0; j < m; ++j) from_writes += block(scores, i, j).cwiseProduct(block(dscores, i, j));
      from_before += rows_of(dreads, i).cwiseProduct(rows_of(reads_a, i)).rowwise().sum().array();
    }
    for (Index j = 0; j < m; ++j)
      from_writes.row(n - 1) +=
          rows_of(dkeys, j).cwiseProduct(rows_of(keys_b, j)).rowwise().sum().transpose();
    from_before(n - 1) += a(n - 1) * dS.cwiseProduct(S).sum();
    auto dg = slice(grads.dg, 1, 0, 1);
    T crossing_before = 0;
    for (Index t = n - 1; t >= 0; --t) {
      crossing.head(n) += from_writes.row(t).transpose().array();
      crossing_before += from_before(t);
      dg(t, 0) = crossing_before + crossing.head(t).sum();
    }
  }

  void store() {
    slice(grads.dq, 1, 0, in.K) = rows_of(dreads, 0);
    if (grads.dk) {
      auto dk = slice(grads.dk, 1, 0, in.K);
      dk.setZero();
      if (in.beta) dk += rows_of(dreads, 1);
      if (Base::keeps_k) dk += rows_of(dkeys, 0);
    }
    const Index M = in.extra_keys();
    for (Index i = 0; i < M; ++i) slice(grads.dkappa, M, i, in.K) = rows_of(dkeys, m - M + i);
    for (Index l = 0; l < in.L; ++l) slice(grads.dw, in.L, l, in.V) = rows_of(dU, Base::lead + l);
  }
};

template <class T>
State<T> chunk_state(const ScanArgs<T>& args, Index head, Index chunk) {
  return {args.states + (head * args.chunks() + chunk) * args.V * args.K, args.V, args.K};
}

}  // namespace

template <class T>
void scan_forward(const ScanArgs<T>& args) {
  parallel_for(args.B * args.H, [&](int64_t head) {
    Chunk<T> chunk(args, head);
    Matrix<T> memory;
    State<T> S = state_of(head, args, args.final_state, args.initial_state, memory);
    for (Index c = 0; c < args.chunks(); ++c) {
      if (args.states) chunk_state(args, head, c) = S;
      chunk.load(c);
      chunk.score(0);
      chunk.read(S, 0);
      chunk.slice(args.o, 1, 0, args.V) = chunk.rows_of(chunk.results, 0);
      chunk.write(S, S);
    }
  });
}

template <class T>
void scan_backward(const ScanArgs<T>& args, const ScanGrads<T>& grads) {
  PRISM_CHECK(args.states, "scan_backward: args.states is null, expected scratch for the chunk states");
  parallel_for(args.B * args.H, [&](int64_t head) {
    Reverse<T> chunk(args, grads, head);
    Matrix<T> memory;
    chunk_state(args, head, 0) = state_of<T>(head, args, nullptr, args.initial_state, memory);
    for (Index c = 0; c < args.chunks(); ++c) {
      const State<T> S = chunk_state(args, head, c);
      chunk.load(c);
      if (args.beta) {
        chunk.score(1);
        chunk.read(S, 1);
        chunk.E() = chunk.rows_of(chunk.results, 1);
      }
      if (c + 1 < args.chunks()) chunk.write(S, chunk_state(args, head, c + 1));
    }
    for (Index c = args.chunks() - 1; c >= 0; --c) {
      chunk.load(c);
      chunk.reverse(chunk_state(args, head, c));
    }
  });
}

PRISM_ON_CPU(scan_forward);
PRISM_ON_CPU(scan_backward);

}  // namespace prism::cpu
