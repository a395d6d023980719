// The scan in chunks on the GPU, written for the reader: the equations of SPEC section 2 in their order,
// beside kernels/scan.cpp. One block walks the chunks of one batch row and head (and, forward, of one tile of
// V: the rows of S never meet there). Everything is float32; matrices of n x n stay in shared memory, those
// with K or V columns in a workspace that only this block touches. kernels/scan_fast.cu does the same on the
// tensor cores.
//
// The erasure is write 0: its key is k, its value W_0 the solution of a triangular system. When kappa_1 is k
// the two share all products, so write 0 stands for W_0 + W_1 throughout:
//   (I + M_0) W_0 = -diag(beta a) K S^T - ...   and W_1 added on both sides   =>
//   (I + M_0) (W_0 + W_1) = W_1 - diag(beta a) K S^T - ...                   with dW_1 = Y.
#include <algorithm>

#include "kernels/cuda.cuh"
#include "kernels/scan_fast.cuh"

namespace prism::cuda {

namespace {

constexpr int kChunk = 64;     // C
constexpr int kThreads = 256;  // a block
constexpr int kTileV = 64;     // rows of S that a forward block has

using Square = float[kChunk][kChunk + 1];  // n x n; the odd row length spreads columns over the memory banks

struct Shared {
  Square gamma;  // Gamma
  Square xg;     // Gamma^- . X_m of the write m at hand
  Square pg;     // Gamma . P_m
  Square dp;     // dP_m
  Square dm;     // dM_m
  float a[kChunk], b[kChunk], beta[kChunk];
  float da[kChunk], db[kChunk], dbeta[kChunk], rows[kChunk], columns[kChunk];
};

// One batch row and head: where token t's vectors stand, and the scratch of this block.
template <class T>
struct HeadView {
  const ScanArgs<T>& args;
  int64_t row, head;
  int K, V, writes;    // writes: 0, and one for each key in kappa
  float* state;        // [V,K]: S in the forward pass, dS in the reverse pass
  float *u, *y;        // [C,V]: W_0; Y, or O in the forward pass
  float *dq, *dk, *t;  // [C,K]

  __device__ HeadView(const ScanArgs<T>& args, int64_t row, int64_t head, float* scratch, int V)
      : args(args), row(row), head(head), K(static_cast<int>(args.K)), V(V) {
    writes = 1 + static_cast<int>(args.extra_keys());
    state = scratch, u = state + V * K, y = u + kChunk * V;
    dq = y + kChunk * V, dk = dq + kChunk * K, t = dk + kChunk * K;
  }
  static constexpr int64_t scratch_floats(int64_t K, int64_t V, bool backward) {
    return V * K + kChunk * 2 * V + (backward ? kChunk * 3 * K : 0);
  }

  __device__ int64_t token(int64_t t) const { return row * args.T_len + t; }
  __device__ int64_t gate(int64_t t) const { return token(t) * args.H + head; }
  __device__ int64_t q(int64_t t) const { return gate(t) * args.K; }
  __device__ int64_t o(int64_t t) const { return gate(t) * args.V; }
  __device__ int64_t kappa(int m, int64_t t) const {
    return ((token(t) * (writes - 1) + m - 1) * args.H + head) * args.K;
  }
  // Write m's value; write 0 has one when kappa_1 is k.
  __device__ bool has_value(int m) const { return m > 0 || !args.own_first_key; }
  __device__ int64_t w(int m, int64_t t) const {
    return ((token(t) * args.L + m - args.own_first_key) * args.H + head) * args.V;
  }
  __device__ const T* key(int m, int64_t t) const { return m ? args.kappa + kappa(m, t) : args.k + q(t); }
};

// out(i, j, sum over k < depth of a(i, k) b(k, j)) for all i < rows, j < cols, by the whole block: a thread
// owns tiles of 4 x 4. The caller synchronises.
template <class A, class B, class Out>
__device__ void product(int rows, int cols, int depth, A a, B b, Out out) {
  const int across = (cols + 3) / 4;
  for (int tile = threadIdx.x; tile < (rows + 3) / 4 * across; tile += kThreads) {
    const int i0 = tile / across * 4, j0 = tile % across * 4;
    float sum[4][4] = {}, x[4], y[4];
    for (int k = 0; k < depth; ++k) {
#pragma unroll
      for (int r = 0; r < 4; ++r) x[r] = a(min(i0 + r, rows - 1), k), y[r] = b(k, min(j0 + r, cols - 1));
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[r][c] += x[r] * y[c];
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (i0 + r < rows && j0 + c < cols) out(i0 + r, j0 + c, sum[r][c]);
  }
}

// Gamma, a, b and beta of the chunk at c0. Each is a sum of log decays carried along from its own start,
// never a difference: exact after -1e4, defined after -inf.
template <class T>
__device__ void decays(Shared& s, const HeadView<T>& view, int64_t c0, int n) {
  const ScanArgs<T>& args = view.args;
  const auto g = [&](int i) { return args.g ? args.g[view.gate(c0 + i)] : 0.f; };
  const auto start = [&](int i) { return args.start ? args.start[view.token(c0 + i)] : 0; };
  const int j = threadIdx.x;
  if (j < n) {
    float sum = 0.f;
    for (int i = 0; i < n; ++i) {
      if (i > j) sum += g(i);
      s.gamma[i][j] = i >= j && c0 + j >= start(i) ? expf(sum) : 0.f;
    }
    s.b[j] = s.gamma[n - 1][j];
    s.beta[j] = args.beta ? args.beta[view.gate(c0 + j)] : 0.f;
  } else if (j == kChunk) {
    float sum = 0.f;
    for (int i = 0; i < n; ++i) {
      sum += g(i);
      s.a[i] = start(i) < max(c0, int64_t{1}) ? expf(sum) : 0.f;
    }
  }
  __syncthreads();
}

// xg = Gamma^- . X_m and pg = Gamma . P_m.
template <class T>
__device__ void key_products(Shared& s, const HeadView<T>& view, int64_t c0, int n, int m) {
  const auto key = [&](int k, int j) { return load(view.key(m, c0 + j) + k); };
  product(
      n, n, view.K, [&](int i, int k) { return load(view.args.k + view.q(c0 + i) + k); }, key,
      [&](int i, int j, float x) { s.xg[i][j] = i > j ? s.gamma[i][j] * x : 0.f; });
  product(
      n, n, view.K, [&](int i, int k) { return load(view.args.q + view.q(c0 + i) + k); }, key,
      [&](int i, int j, float x) { s.pg[i][j] = s.gamma[i][j] * x; });
  __syncthreads();
}

// u = W_0 (+ W_1 where it shares the key): R, then forward substitution. Leaves write 0's key products in
// place. `S` is the incoming state, v0 the first of this block's V columns.
template <class T>
__device__ void solve(Shared& s, const HeadView<T>& view, const float* S, int64_t c0, int n, int64_t v0) {
  const int K = view.K, V = view.V;
  const auto w = [&](int m, int j, int v) { return load(view.args.w + view.w(m, c0 + j) + v0 + v); };
  product(
      n, V, K, [&](int i, int k) { return load(view.args.k + view.q(c0 + i) + k); },
      [&](int k, int v) { return S[v * K + k]; },
      [&](int i, int v, float x) {
        view.u[i * V + v] = (view.has_value(0) ? w(0, i, v) : 0.f) - s.beta[i] * s.a[i] * x;
      });
  for (int m = view.writes - 1; m >= 1; --m) {
    key_products(s, view, c0, n, m);
    product(
        n, V, n, [&](int i, int j) { return s.xg[i][j]; }, [&](int j, int v) { return w(m, j, v); },
        [&](int i, int v, float x) { view.u[i * V + v] -= s.beta[i] * x; });
    __syncthreads();
  }
  key_products(s, view, c0, n, 0);
  for (int v = threadIdx.x; v < V; v += kThreads)
    for (int i = 1; i < n; ++i) {
      float sum = 0.f;
      for (int j = 0; j < i; ++j) sum += s.xg[i][j] * view.u[j * V + v];
      view.u[i * V + v] -= s.beta[i] * sum;
    }
  __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(ScanArgs<T> args, float* scratch, bool states_only) {
  extern __shared__ char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int64_t v0 = blockIdx.x * kTileV, pair = blockIdx.z * args.H + blockIdx.y;
  const int V = static_cast<int>(min(args.V - v0, int64_t{kTileV})), K = static_cast<int>(args.K);
  const int64_t scratch_size = HeadView<T>::scratch_floats(args.K, kTileV, false);
  const HeadView<T> view(args, blockIdx.z, blockIdx.y,
                         scratch + (pair * gridDim.x + blockIdx.x) * scratch_size, V);
  const int64_t state_at = (pair * args.V + v0) * K;
  float *S = view.state, *o = view.y;
  const auto value = [&](int m, int64_t c0, int j, int v) {
    return m ? load(args.w + view.w(m, c0 + j) + v0 + v) : view.u[j * V + v];
  };

  for (int e = threadIdx.x; e < V * K; e += kThreads)
    S[e] = args.initial_state ? args.initial_state[state_at + e] : 0.f;
  __syncthreads();
  for (int64_t chunk = 0; chunk < args.chunks(); ++chunk) {
    const int64_t c0 = chunk * kChunk;
    const int n = static_cast<int>(min(args.T_len - c0, int64_t{kChunk}));
    if (args.states)
      for (int e = threadIdx.x; e < V * K; e += kThreads)
        args.states[(pair * args.chunks() + chunk) * args.V * K + v0 * K + e] = S[e];
    decays(s, view, c0, n);
    solve(s, view, S, c0, n, v0);

    // O = diag(a) Q S^T + sum_m (Gamma . P_m) W_m
    if (!states_only) {
      product(
          n, V, K, [&](int i, int k) { return load(args.q + view.q(c0 + i) + k); },
          [&](int k, int v) { return S[v * K + k]; },
          [&](int i, int v, float x) { o[i * V + v] = s.a[i] * x; });
      for (int m = 0; m < view.writes; ++m) {
        if (m > 0) key_products(s, view, c0, n, m);
        product(
            n, V, n, [&](int i, int j) { return s.pg[i][j]; },
            [&](int j, int v) { return value(m, c0, j, v); },
            [&](int i, int v, float x) { o[i * V + v] += x; });
        __syncthreads();
      }
      for (int e = threadIdx.x; e < n * V; e += kThreads)
        store(args.o + view.o(c0 + e / V) + v0 + e % V, o[e]);
    }
    // S' = a_n S + sum_m (diag(b) W_m)^T kappa_m
    for (int m = 0; m < view.writes; ++m)
      product(
          V, K, n, [&](int v, int j) { return s.b[j] * value(m, c0, j, v); },
          [&](int j, int k) { return load(view.key(m, c0 + j) + k); },
          [&](int v, int k, float x) { S[v * K + k] = (m ? 1.f : s.a[n - 1]) * S[v * K + k] + x; });
    __syncthreads();
  }
  if (args.final_state)
    for (int e = threadIdx.x; e < V * K; e += kThreads) args.final_state[state_at + e] = S[e];
}

// to[i] = sum over k of x_i . y_i, by a warp a row.
template <class Y>
__device__ void row_dots(int n, int K, const float* x, Y y, float* to, bool add) {
  for (int i = threadIdx.x / kWarp; i < n; i += kThreads / kWarp) {
    float sum = 0.f;
    for (int k = threadIdx.x % kWarp; k < K; k += kWarp) sum += x[i * K + k] * y(i, k);
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) to[i] = (add ? to[i] : 0.f) + sum;
  }
}

// The part of the reverse pass that write m has to itself; S and dS are the states before and after the
// chunk, dS with its gradient's sense. Adds to dq, dk, db, dbeta and the sums of dGamma . Gamma.
template <class T>
__device__ void write_backward(Shared& s, const HeadView<T>& view, const ScanGrads<T>& grads, int64_t c0,
                               int n, int m) {
  const ScanArgs<T>& args = view.args;
  const int K = view.K, V = view.V;
  const float* dS = view.state;
  const auto d_o = [&](int i, int v) { return load(grads.d_o + view.o(c0 + i) + v); };
  const auto value = [&](int j, int v) {
    return m ? load(args.w + view.w(m, c0 + j) + v) : view.u[j * V + v];
  };
  const auto key = [&](int j, int k) { return load(view.key(m, c0 + j) + k); };
  const auto gamma_dp = [&](int i, int j) { return s.gamma[i][j] * s.dp[i][j]; };
  const auto z = [&](int i, int j) { return i > j ? s.beta[i] * s.gamma[i][j] * s.dm[i][j] : 0.f; };

  // dP_m = dO W_m^T;   dM_m = -(strict lower part of) Y W_m^T
  const auto value_t = [&](int v, int j) { return value(j, v); };
  product(n, n, V, d_o, value_t, [&](int i, int j, float x) { s.dp[i][j] = x; });
  product(
      n, n, V, [&](int i, int v) { return view.y[i * V + v]; }, value_t,
      [&](int i, int j, float x) { s.dm[i][j] = i > j ? -x : 0.f; });
  // W_m dS, for dkappa_m and db
  product(
      n, K, V, value, [&](int v, int k) { return dS[v * K + k]; },
      [&](int j, int k, float x) { view.t[j * K + k] = x; });
  __syncthreads();
  row_dots(n, K, view.t, key, s.db, true);
  const int i = threadIdx.x;
  if (i < n) {  // row sums
    for (int j = 0; j < n; ++j) {
      s.dbeta[i] += s.dm[i][j] * s.xg[i][j];
      s.rows[i] += s.dp[i][j] * s.pg[i][j] + s.beta[i] * s.dm[i][j] * s.xg[i][j];
    }
  } else if (i >= kChunk && i - kChunk < n) {  // column sums
    const int j = i - kChunk;
    for (int r = 0; r < n; ++r) s.columns[j] += s.dp[r][j] * s.pg[r][j] + s.beta[r] * s.dm[r][j] * s.xg[r][j];
  }

  // dQ += (Gamma . dP_m) kappa_m;   dK_row += Z_m kappa_m
  product(n, K, n, gamma_dp, key, [&](int i, int k, float x) { view.dq[i * K + k] += x; });
  product(n, K, n, z, key, [&](int i, int k, float x) { view.dk[i * K + k] += x; });
  __syncthreads();
  // dkappa_m = (Gamma . dP_m)^T Q + Z_m^T K + diag(b) W_m dS, the two products as one over 2n
  product(
      n, K, 2 * n, [&](int j, int i) { return i < n ? gamma_dp(i, j) : z(i - n, j); },
      [&](int i, int k) {
        return i < n ? load(args.q + view.q(c0 + i) + k) : load(args.k + view.q(c0 + i - n) + k);
      },
      [&](int j, int k, float x) {
        const float dkappa = s.b[j] * view.t[j * K + k] + x;
        if (m)
          store(grads.dkappa + view.kappa(m, c0 + j) + k, dkappa);
        else
          view.dk[j * K + k] += dkappa;
      });
  // dW_m = diag(b) kappa_m dS^T + (Gamma . P_m)^T dO - (diag(beta) Gamma^- . X_m)^T Y, as one over K + 2n
  if (m)
    product(
        n, V, K + 2 * n,
        [&](int j, int k) {
          const int i = k < K + n ? k - K : k - K - n;
          return k < K ? s.b[j] * key(j, k) : k < K + n ? s.pg[i][j] : -s.beta[i] * s.xg[i][j];
        },
        [&](int k, int v) {
          const int i = k < K + n ? k - K : k - K - n;
          return k < K ? dS[v * K + k] : k < K + n ? d_o(i, v) : view.y[i * V + v];
        },
        [&](int j, int v, float x) { store(grads.dw + view.w(m, c0 + j) + v, x); });
  __syncthreads();
}

// Y = (I + M_0)^{-T} dW_0 with dW_0 = (Gamma . P_0)^T dO + diag(b) K dS^T, by back substitution; dw_1 = Y.
template <class T>
__device__ void solve_transposed(Shared& s, const HeadView<T>& view, const ScanGrads<T>& grads, int64_t c0,
                                 int n) {
  const int K = view.K, V = view.V;
  product(
      n, V, K + n,
      [&](int j, int k) { return k < K ? s.b[j] * load(view.key(0, c0 + j) + k) : s.pg[k - K][j]; },
      [&](int k, int v) { return k < K ? view.state[v * K + k] : load(grads.d_o + view.o(c0 + k - K) + v); },
      [&](int j, int v, float x) { view.y[j * V + v] = x; });
  __syncthreads();
  for (int v = threadIdx.x; v < V; v += kThreads)
    for (int j = n - 1; j >= 0; --j) {
      float sum = 0.f;
      for (int i = j + 1; i < n; ++i) sum += s.beta[i] * s.xg[i][j] * view.y[i * V + v];
      view.y[j * V + v] -= sum;
      if (view.has_value(0)) store(grads.dw + view.w(0, c0 + j) + v, view.y[j * V + v]);
    }
  __syncthreads();
}

// dbeta, and dg_m = sum of dG_i over i >= m in m's document; dG_i = row sum - column sum + da_i a_i.
template <class T>
__device__ void finish_gates(Shared& s, const HeadView<T>& view, const ScanGrads<T>& grads, int64_t c0,
                             int n) {
  if (grads.dbeta && threadIdx.x < n) grads.dbeta[view.gate(c0 + threadIdx.x)] = s.dbeta[threadIdx.x];
  if (!grads.dg || threadIdx.x > 0) return;
  const int32_t* start = view.args.start ? view.args.start + view.token(c0) : nullptr;
  float sum = 0.f;
  for (int j = 0; j < n; ++j) sum += s.db[j] * s.b[j];  // dGamma's row n
  for (int i = n - 1; i >= 0; --i) {
    sum += s.rows[i] - s.columns[i] - s.db[i] * s.b[i] + s.da[i] * s.a[i];
    grads.dg[view.gate(c0 + i)] = sum;
    if (start && start[i] == c0 + i) sum = 0.f;  // i opens a document: what follows ends the one before
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(ScanArgs<T> args, ScanGrads<T> grads, float* scratch) {
  extern __shared__ char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int64_t pair = blockIdx.y * args.H + blockIdx.x;
  const int V = static_cast<int>(args.V), K = static_cast<int>(args.K), VK = V * K;
  const HeadView<T> view(args, blockIdx.y, blockIdx.x,
                         scratch + pair * HeadView<T>::scratch_floats(K, V, true), V);
  float* dS = view.state;
  const auto q = [&](int64_t t, int k) { return load(args.q + view.q(t) + k); };
  const auto key = [&](int64_t t, int k) { return load(args.k + view.q(t) + k); };
  const auto d_o = [&](int64_t t, int v) { return load(grads.d_o + view.o(t) + v); };

  for (int e = threadIdx.x; e < VK; e += kThreads)
    dS[e] = grads.dfinal_state ? grads.dfinal_state[pair * VK + e] : 0.f;
  __syncthreads();
  for (int64_t chunk = args.chunks() - 1; chunk >= 0; --chunk) {
    const int64_t c0 = chunk * kChunk;
    const int n = static_cast<int>(min(args.T_len - c0, int64_t{kChunk}));
    const float* S = args.states + (pair * args.chunks() + chunk) * VK;
    decays(s, view, c0, n);
    solve(s, view, S, c0, n, 0);

    solve_transposed(s, view, grads, c0, n);

    // What reads the incoming state: dQ = diag(a) dO S + ..., dK_row = -diag(beta a) Y S + ..., da and dbeta
    const auto state = [&](int v, int k) { return S[v * K + k]; };
    product(
        n, K, V, [&](int i, int v) { return d_o(c0 + i, v); }, state,
        [&](int i, int k, float x) { view.dq[i * K + k] = x; });
    product(
        n, K, V, [&](int i, int v) { return view.y[i * V + v]; }, state,
        [&](int i, int k, float x) { view.dk[i * K + k] = x; });
    __syncthreads();
    row_dots(
        n, K, view.dq, [&](int i, int k) { return q(c0 + i, k); }, s.da, false);
    row_dots(
        n, K, view.dk, [&](int i, int k) { return key(c0 + i, k); }, s.dbeta, false);
    float state_dot = 0.f;
    for (int e = threadIdx.x; e < VK; e += kThreads) state_dot += dS[e] * S[e];
    state_dot = block_sum(state_dot);  // <dS, S>; synchronises
    for (int e = threadIdx.x; e < n * K; e += kThreads) {
      view.dq[e] *= s.a[e / K];
      view.dk[e] *= -s.beta[e / K] * s.a[e / K];
    }
    if (threadIdx.x < n) {
      const int i = threadIdx.x;
      s.da[i] -= s.beta[i] * s.dbeta[i];
      s.dbeta[i] *= -s.a[i];
      if (i == n - 1) s.da[i] += state_dot;
      s.db[i] = s.rows[i] = s.columns[i] = 0.f;
    }
    __syncthreads();
    for (int m = 0; m < view.writes; ++m) {
      if (m > 0) key_products(s, view, c0, n, m);
      write_backward(s, view, grads, c0, n, m);
    }

    finish_gates(s, view, grads, c0, n);
    for (int e = threadIdx.x; e < n * K; e += kThreads) {
      store(grads.dq + view.q(c0 + e / K) + e % K, view.dq[e]);
      store(grads.dk + view.q(c0 + e / K) + e % K, view.dk[e]);
    }
    // dS_in = a_n dS + dO^T diag(a) Q - Y^T diag(beta a) K, the two products as one over 2n
    product(
        V, K, 2 * n,
        [&](int v, int i) {
          return i < n ? s.a[i] * d_o(c0 + i, v) : -s.beta[i - n] * s.a[i - n] * view.y[(i - n) * V + v];
        },
        [&](int i, int k) { return i < n ? q(c0 + i, k) : key(c0 + i - n, k); },
        [&](int v, int k, float x) { dS[v * K + k] = s.a[n - 1] * dS[v * K + k] + x; });
    __syncthreads();
  }
  if (grads.dinitial_state)
    for (int e = threadIdx.x; e < VK; e += kThreads) grads.dinitial_state[pair * VK + e] = dS[e];
}

template <class T>
void check(const ScanArgs<T>& args) {
  PRISM_CHECK(args.C == kChunk, "scan: expected chunk ", kChunk, " on cuda, got ", args.C);
  const auto check_width = [](const char* name, int64_t size) {
    PRISM_CHECK(size % 8 == 0 && size >= 16 && size <= 256, "scan: expected ", name,
                " a multiple of 8 from 16 to 256 on cuda, got ", size);
  };
  check_width("K", args.K), check_width("V", args.V);
  PRISM_CHECK(args.B < 65536 && args.H < 65536, "scan: expected B and H below 65536 on cuda, got ", args.B,
              " and ", args.H);
}

template <class T>
void forward(const ScanArgs<T>& args, bool states_only) {
  CUDA_CHECK(
      cudaFuncSetAttribute(forward_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  const dim3 grid(static_cast<unsigned>(ceil_div(args.V, kTileV)), static_cast<unsigned>(args.H),
                  static_cast<unsigned>(args.B));
  forward_kernel<<<grid, kThreads, sizeof(Shared), stream()>>>(args, static_cast<float*>(args.workspace),
                                                               states_only);
  CUDA_CHECK_LAUNCH();
}

}  // namespace

template <class T>
size_t scan_workspace_bytes(const ScanArgs<T>& args, bool backward) {
  const int64_t forward_floats =
      ceil_div(args.V, kTileV) * HeadView<T>::scratch_floats(args.K, kTileV, false);
  const int64_t backward_floats = backward ? HeadView<T>::scratch_floats(args.K, args.V, true) : 0;
  size_t bytes =
      static_cast<size_t>(args.B * args.H * std::max(forward_floats, backward_floats)) * sizeof(float);
  if constexpr (std::is_same_v<T, bf16>)
    if (fast_covers(args, backward)) bytes = std::max(bytes, fast_workspace_bytes(args, backward));
  return bytes;
}

template <class T>
void scan_forward(const ScanArgs<T>& args) {
  check(args);
  if constexpr (std::is_same_v<T, bf16>)
    if (kernel_choice == KernelChoice::fast && !args.states && fast_covers(args, false))
      return fast_forward(args);
  forward(args, false);
}

template <class T>
void scan_backward(const ScanArgs<T>& args, const ScanGrads<T>& grads) {
  check(args);
  PRISM_CHECK(args.states, "scan: the reverse pass needs args.states");
  if constexpr (std::is_same_v<T, bf16>)
    if (kernel_choice == KernelChoice::fast && fast_covers(args, true)) return fast_backward(args, grads);
  ScanArgs<T> states = args;
  states.final_state = nullptr;
  forward(states, true);
  CUDA_CHECK(
      cudaFuncSetAttribute(backward_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  backward_kernel<<<dim3(static_cast<unsigned>(args.H), static_cast<unsigned>(args.B)), kThreads,
                    sizeof(Shared), stream()>>>(args, grads, static_cast<float*>(args.workspace));
  CUDA_CHECK_LAUNCH();
}

PRISM_ON_CUDA(scan_workspace_bytes);
PRISM_ON_CUDA(scan_forward);
PRISM_ON_CUDA(scan_backward);

}  // namespace prism::cuda
