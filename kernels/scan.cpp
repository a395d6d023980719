// The scan in chunks of C tokens, forward and reverse: kernels/README.md derives every line and uses its
// names. One task is one head of one batch row; it walks that head's chunks in order.
#include "kernels/scan.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <limits>

#include "tensor/parallel.h"

namespace prism::cpu {
namespace {

using Index = int64_t;
template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using Vector = Eigen::Array<T, Eigen::Dynamic, 1>;
template <class T>
using Strided = Eigen::Map<Matrix<T>, 0, Eigen::OuterStride<>>;
template <class T>
using ConstStrided = Eigen::Map<const Matrix<T>, 0, Eigen::OuterStride<>>;

constexpr Index kTile = 8;  // rows a triangular solve takes by substitution between its matrix products

// What both passes hold of one chunk of one head. A token reads the state twice: by q_i after its own writes
// and, for the erasure, by k_i before them; it writes m times, each distinct key once.
//
//   read_rows [r n, K]  q; k                    r = 2 with erasure, else 1
//   key_rows  [m n, K]  k; kappa (or kappa)     where k is both, it stands once for both
//   U         [m n, V]  values written: U_0 = w_1 - beta E where a key is k, else w_l
//   E         [n, V]    E_i = alpha_i S_{i-1} k_i, what the state recalls for k_i before token i
//   Gamma     [n, n]    decay from token j to token i, a [n] from before the chunk, b [n] to its end
//   scores    [r n, m n] Gamma . (q; k) keys^T, for k without the diagonal
template <class T>
struct Chunk {
  const ScanArgs<T>& in;
  const Index b, h, m, r, lead;
  const bool keeps_k;  // k stands in `rows`
  Index c0 = 0, n = 0;
  Matrix<T> rows, carried_reads, carried_keys, U, Gamma, scores;
  Vector<T> a, b_end, beta;

  // `lead`: key blocks before that of the first write of `w`, 1 when k erases only.
  Chunk(const ScanArgs<T>& args, Index head)
      : in(args),
        b(head / args.H),
        h(head % args.H),
        m(args.extra_keys() + (args.beta || !args.own_first_key)),
        r(args.beta ? 2 : 1),
        lead(m - args.L),
        keeps_k(m > args.extra_keys()) {
    const Index C = std::min(in.C, in.T_len);
    rows.resize((1 + m) * C, in.K), carried_reads.resize(r * C, in.K), carried_keys.resize(m * C, in.K);
    U.resize(m * C, in.V), Gamma.setZero(C, C), scores.resize(r * C, m * C);
    a.resize(C), b_end.resize(C), beta.resize(C);
  }

  // This chunk's rows of entry `i` of `count` in a tensor [B,T,count,H,width].
  template <class P>
  auto slice(P* base, Index count, Index i, Index width) const {
    using Map = std::conditional_t<std::is_const_v<P>, ConstStrided<T>, Strided<T>>;
    return Map(base + (((b * in.T_len + c0) * count + i) * in.H + h) * width, n, width,
               Eigen::OuterStride<>(count * in.H * width));
  }

  auto read_rows() { return rows.topRows(r * n); }
  auto key_rows() { return rows.middleRows(n, m * n); }
  // Block (read, key) of an [r n, m n] matrix.
  auto block(Matrix<T>& x, Index read, Index key) { return x.block(read * n, key * n, n, n); }
  auto rows_of(Matrix<T>& x, Index i) { return x.middleRows(i * n, n); }

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
    for (Index i = 0; i < r; ++i) rows_of(carried_reads, i) = rows_of(rows, i).array().colwise() * a.head(n);
    for (Index i = 0; i < m; ++i)
      rows_of(carried_keys, i) = rows_of(rows, 1 + i).array().colwise() * b_end.head(n);
  }

  // Gamma, a and b, from each token downwards: products of alphas, never differences of sums. What falls
  // under `least` counts as 0, for products with subnormal numbers take a hundred times as long.
  void decay() {
    const T least = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon();
    const auto kept = [&](auto x) { return (x >= least).select(x, T(0)); };
    const int32_t* start = in.start ? in.start + b * in.T_len + c0 : nullptr;
    T from_before = 1;
    for (Index i = 0; i < n; ++i) {
      const T alpha = in.g ? std::exp(in.g[(b * in.T_len + c0 + i) * in.H + h]) : T(1);
      const Index first = start ? std::max<Index>(0, start[i] - c0) : 0;
      const bool reached = !start || start[i] < std::max<Index>(c0, 1);
      from_before = reached && alpha * from_before >= least ? alpha * from_before : T(0);
      a(i) = from_before;
      Gamma.row(i).head(first).setZero();
      if (i > first)
        Gamma.row(i).segment(first, i - first) =
            kept(alpha * Gamma.row(i - 1).segment(first, i - first).array());
      Gamma(i, i) = 1;
    }
    b_end.head(n) = Gamma.row(n - 1).head(n).transpose().array();
  }

  // scores of reads [first, r)
  void score(Index first) {
    auto block_rows = scores.block(first * n, 0, (r - first) * n, m * n);
    block_rows.noalias() = rows.middleRows(first * n, (r - first) * n) * key_rows().transpose();
    for (Index read = first; read < r; ++read) mask(scores, read);
  }
  // Gamma . x for the blocks of one read; k_i does not see token i's own writes.
  void mask(Matrix<T>& x, Index read) {
    for (Index key = 0; key < m; ++key) {
      block(x, read, key).array() *= Gamma.topLeftCorner(n, n).array();
      if (read == 1) block(x, read, key).diagonal().setZero();
    }
  }

  // Reads [first, r) of the chunk: `results` [r n, V], row i of q's block is o_i, of k's block E_i. Turns U_0
  // from w_1 into w_1 - beta E.
  void read(const Matrix<T>& S, Matrix<T>& results, Index first) {
    const Index from = first * n, count = (r - first) * n;
    auto result = results.middleRows(from, count);
    result.noalias() = carried_reads.middleRows(from, count) * S.transpose();
    const Index known = in.beta ? 1 : 0;  // key blocks from here on have their values already
    if (m > known)
      result.noalias() +=
          scores.block(from, known * n, count, (m - known) * n) * U.middleRows(known * n, (m - known) * n);
    if (!in.beta) return;
    substitute(results);
    if (first == 0) rows_of(results, 0).noalias() += block(scores, 0, 0) * rows_of(U, 0);
  }

  // E_i += sum_{j<i} N_ij U_j,  U_i = w_i - beta_i E_i,  N = the scores of k by k
  void substitute(Matrix<T>& results) {
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

  // S <- a_n S + sum_j b_j U_j key_j^T
  void write(Matrix<T>& S) {
    S *= a(n - 1);
    S.noalias() += U.topRows(m * n).transpose() * carried_keys.topRows(m * n);
  }
};

// The reverse pass of one head: gradients of a chunk's parts, each named d and of its part's shape.
template <class T>
struct Reverse : Chunk<T> {
  using Chunk<T>::in, Chunk<T>::n, Chunk<T>::m, Chunk<T>::r, Chunk<T>::U, Chunk<T>::scores, Chunk<T>::beta;
  using Chunk<T>::rows_of, Chunk<T>::block, Chunk<T>::slice, Chunk<T>::a, Chunk<T>::b_end;
  const ScanGrads<T>& grads;
  Matrix<T> dS, dresults, dU, dscores, dreads, dkeys, flow, E;

  Reverse(const ScanArgs<T>& args, const ScanGrads<T>& g, Index head) : Chunk<T>(args, head), grads(g) {
    const Index C = std::min(in.C, in.T_len);
    dresults.resize(r * C, in.V), dU.resize(m * C, in.V), dscores.resize(r * C, m * C);
    dreads.resize(r * C, in.K), dkeys.resize(m * C, in.K), flow.resize(C, C);
    if (in.beta) E.resize(in.T_len, in.V);
    const Index head_size = in.V * in.K;
    if (grads.dfinal_state)
      dS = Eigen::Map<const Matrix<T>>(grads.dfinal_state + head * head_size, in.V, in.K);
    else
      dS.setZero(in.V, in.K);
  }

  void chunk(const Matrix<T>& S) {
    this->score(0);
    if (in.beta) rows_of(U, 0).array() -= E.middleRows(this->c0, n).array().colwise() * beta.head(n);
    rows_of(dresults, 0) = slice(grads.d_o, 1, 0, in.V);
    values();
    keys(S);
    if (in.g) decays(S);
    auto scored = dscores.topLeftCorner(r * n, m * n);
    for (Index read = 0; read < r; ++read) this->mask(dscores, read);
    for (Index i = 0; i < r; ++i) rows_of(dreads, i).array().colwise() *= a.head(n);
    for (Index i = 0; i < m; ++i) rows_of(dkeys, i).array().colwise() *= b_end.head(n);
    dreads.topRows(r * n).noalias() += scored * this->key_rows();
    dkeys.topRows(m * n).noalias() += scored.transpose() * this->read_rows();
    dS *= a(n - 1);
    dS.noalias() += dresults.topRows(r * n).transpose() * this->carried_reads.topRows(r * n);
    store();
  }

  // dU = scores^T dresults + (b . keys) dS^T, where dresults' part for E, -beta dU_0, comes from dU itself.
  void values() {
    auto all = dU.topRows(m * n);
    all.noalias() = this->carried_keys.topRows(m * n) * dS.transpose();
    all.noalias() += scores.topLeftCorner(n, m * n).transpose() * rows_of(dresults, 0);
    if (!in.beta) return;
    substitute_back();
    if (m > 1)
      dU.middleRows(n, (m - 1) * n).noalias() +=
          scores.block(n, n, n, (m - 1) * n).transpose() * rows_of(dresults, 1);
    auto dbeta = slice(grads.dbeta, 1, 0, 1);
    dbeta = -(rows_of(dU, 0).array() * E.middleRows(this->c0, n).array()).rowwise().sum().matrix();
  }
  // dU_j += sum_{i>j} N_ij dE_i,  dE_j = -beta_j dU_j, last token first
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

  // Not yet times Gamma, a and b: what scores, reads and keys get from each other and from the two states.
  void keys(const Matrix<T>& S) {
    dscores.topLeftCorner(r * n, m * n).noalias() = dresults.topRows(r * n) * U.topRows(m * n).transpose();
    dreads.topRows(r * n).noalias() = dresults.topRows(r * n) * S;
    dkeys.topRows(m * n).noalias() = U.topRows(m * n) * dS;
  }

  // flow_ij [n, n]: the part of the loss that goes from token j's writes through the decay to token i's
  // reads, row n's also to the state after; from_before_i: from the state before. dg_m is all that crosses m:
  // the sum over i >= m and j < m. Nothing is subtracted, so a decay of 0 has a gradient of exactly 0.
  void decays(const Matrix<T>& S) {
    auto through = flow.topLeftCorner(n, n).array();
    through.setZero();
    Vector<T> from_before = Vector<T>::Zero(n), crossing = Vector<T>::Zero(n);
    for (Index i = 0; i < r; ++i) {
      for (Index key = 0; key < m; ++key)
        through += block(scores, i, key).array() * block(dscores, i, key).array();
      from_before += (rows_of(dreads, i).array() * rows_of(this->carried_reads, i).array()).rowwise().sum();
    }
    for (Index key = 0; key < m; ++key)
      through.row(n - 1) += (rows_of(dkeys, key).array() * rows_of(this->carried_keys, key).array())
                                .rowwise()
                                .sum()
                                .transpose();
    from_before(n - 1) += a(n - 1) * (dS.array() * S.array()).sum();
    auto dg = slice(grads.dg, 1, 0, 1);
    T total = 0;
    for (Index t = n - 1; t >= 0; --t) {
      crossing += through.row(t).transpose();
      total += from_before(t);
      dg(t, 0) = total + crossing.head(t).sum();
    }
  }

  void store() {
    slice(grads.dq, 1, 0, in.K) = rows_of(dreads, 0);
    if (grads.dk) {
      auto dk = slice(grads.dk, 1, 0, in.K);
      dk.setZero();
      if (in.beta) dk += rows_of(dreads, 1);
      if (this->keeps_k) dk += rows_of(dkeys, 0);
    }
    const Index M = in.extra_keys();
    for (Index i = 0; i < M; ++i) slice(grads.dkappa, M, i, in.K) = rows_of(dkeys, m - M + i);
    for (Index l = 0; l < in.L; ++l) slice(grads.dw, in.L, l, in.V) = rows_of(dU, this->lead + l);
  }
};

template <class T>
Matrix<T> state_before(const ScanArgs<T>& args, Index head) {
  if (!args.initial_state) return Matrix<T>::Zero(args.V, args.K);
  return Eigen::Map<const Matrix<T>>(args.initial_state + head * args.V * args.K, args.V, args.K);
}

template <class T>
Eigen::Map<Matrix<T>> chunk_state(const ScanArgs<T>& args, Index head, Index chunk) {
  return {args.states + (head * args.chunks() + chunk) * args.V * args.K, args.V, args.K};
}

}  // namespace

template <class T>
void scan_forward(const ScanArgs<T>& args) {
  parallel_for(args.B * args.H, [&](int64_t head) {
    Chunk<T> chunk(args, head);
    Matrix<T> S = state_before(args, head), results(chunk.r * std::min(args.C, args.T_len), args.V);
    for (Index c = 0; c < args.chunks(); ++c) {
      if (args.states) chunk_state(args, head, c) = S;
      chunk.load(c);
      chunk.score(0);
      chunk.read(S, results, 0);
      chunk.slice(args.o, 1, 0, args.V) = chunk.rows_of(results, 0);
      chunk.write(S);
    }
    if (args.final_state)
      Eigen::Map<Matrix<T>>(args.final_state + head * args.V * args.K, args.V, args.K) = S;
  });
}

template <class T>
void scan_backward(const ScanArgs<T>& args, const ScanGrads<T>& grads) {
  PRISM_CHECK(args.states, "scan_backward: args.states is null, expected scratch for the chunk states");
  parallel_for(args.B * args.H, [&](int64_t head) {
    Reverse<T> chunk(args, grads, head);
    Matrix<T> S = state_before(args, head), results(chunk.r * std::min(args.C, args.T_len), args.V);
    for (Index c = 0; c < args.chunks(); ++c) {
      chunk_state(args, head, c) = S;
      chunk.load(c);
      if (args.beta) {
        chunk.score(1);
        chunk.read(S, results, 1);
        chunk.E.middleRows(chunk.c0, chunk.n) = chunk.rows_of(results, 1);
      }
      chunk.write(S);
    }
    for (Index c = args.chunks() - 1; c >= 0; --c) {
      S = chunk_state(args, head, c);
      chunk.load(c);
      chunk.chunk(S);
    }
    if (grads.dinitial_state)
      Eigen::Map<Matrix<T>>(grads.dinitial_state + head * args.V * args.K, args.V, args.K) = chunk.dS;
  });
}

template void scan_forward(const ScanArgs<float>&);
template void scan_forward(const ScanArgs<double>&);
template void scan_backward(const ScanArgs<float>&, const ScanGrads<float>&);
template void scan_backward(const ScanArgs<double>&, const ScanGrads<double>&);

}  // namespace prism::cpu
