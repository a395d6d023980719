// The serial solver on the card. A block per batch row and head walks the tokens in order, with the memory's
// weights in its threads' registers; the reverse pass has their gradient in shared memory, 128 KiB.
#include "kernels/ttt.cuh"

namespace prism::cuda {

namespace {

using namespace ttt;

template <class T>
__device__ void keep_state(const Place& at, const Head<T>& head, Tile& W1, Tile& W2, float& b1, float2& b2) {
  float* const state = head.a.final_state + head.i * head.a.P();
  const auto keep = [&](float w, int64_t j, bool inside, bool own = true) {
    if (inside && own) state[j] = w - head.a.initial_weight(head.h, j);
  };
  head.tiles(at, W1, W2, keep), head.biases(at, b1, b2, keep);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(TttArgs<T> a) {
  __shared__ alignas(16) float ring[4][3][kWide], e[kWide];  // q, k, v of recent tokens
  __shared__ alignas(16) Vectors parts[2];                   // of W2 x1; of the read
  const Place at;
  const Head<T> head(a);
  const Norm norm(a.K);
  const float2 gamma = norm.load(a.norm_weight + head.h * a.K), bias = norm.load(a.norm_bias + head.h * a.K);
  const int row = at.own_row(), c = threadIdx.x % kWide, which = threadIdx.x / kWide;
  const bool writes = a.record && at.first_copy() && row < a.M;
  Tile W1, W2;
  float b1 = 0, next = 0, next_eta = 0;
  float2 b2 = {}, b2_read = {};
  bool next_opens = true;
  const auto fetch = [&](int64_t t) {
    if (t >= a.T_len) return;
    const T* const from = which == 0 ? a.q : which == 1 ? a.k : a.v;
    next = which < 3 && c < a.K ? load(from + head.token(t) * a.K + c) : 0.f;
    next_eta = a.rate * a.beta[head.token(t)], next_opens = a.opens_document(head.b, t);
  };
  const auto read = [&](int64_t t) {  // one warp
    float r;
    const float2 ahat = norm.normalise(total(parts[1]) + b2_read, a.eps, r);
    if (a.o) norm.store(a.o + head.token(t) * a.K, pair_of(ring[t % 4][0]) + gamma * ahat + bias);
    if (!a.record) return;
    norm.store(head.record(t) + 3 * a.M + a.K, ahat);
    if (at.lane == 0) head.record(t)[3 * a.M + 3 * a.K + 1] = r;
  };
  fetch(0);
  if (which < 3) ring[0][which][c] = next;
  __syncthreads();
  for (int64_t t = 0; t < a.T_len; ++t) {
    const float *q = ring[t % 4][0], *k = ring[t % 4][1], eta = next_eta;
    float* const record = a.record ? head.record(t) : nullptr;
    if (next_opens) {
      const float* const state = head.state_at(t);
      head.initial(at, W1, W2, state);
      head.biases(at, b1, b2,
                  [&](float& w, int64_t j, bool inside, bool) { w = inside ? head.weight(j, state) : 0.f; });
    }
    fetch(t + 1);
    const float z1 = times(at, W1, k) + b1;
    const Gelu<float> x1(z1);
    sum_transposed(at, parts[0][at.warp], W2, x1.value);
    __syncthreads();
    if (which < 3) ring[(t + 1) % 4][which][c] = next;
    if (at.warp == 0) {
      float r;
      const float2 zhat = norm.normalise(total(parts[0]) + b2, a.eps, r);
      const float2 d = gamma * zhat + bias + pair_of(ring[t % 4][1]) - pair_of(ring[t % 4][2]);
      const float2 error = norm.through(gamma * d, zhat, r);
      pair_of(e) = error;
      if (record) {
        norm.store(record + 3 * a.M, zhat), norm.store(record + 3 * a.M + 2 * a.K, error);
        if (at.lane == 0) record[3 * a.M + 3 * a.K] = r;
      }
    }
    if (at.warp == 1 && t > 0) read(t - 1);
    __syncthreads();
    const float h = times(at, W2, e), f = h * x1.slope;
    add_outer(at, W2, -eta * x1.value, e), add_outer(at, W1, -eta * f, k);
    b1 -= eta * f, b2 = b2 - eta * pair_of(e), b2_read = b2;
    const float a1 = times(at, W1, q) + b1;
    sum_transposed(at, parts[1][at.warp], W2, Gelu<float>(a1).value);
    if (writes) record[row] = z1, record[a.M + row] = h, record[2 * a.M + row] = a1;
  }
  __syncthreads();
  if (at.warp == 1) read(a.T_len - 1);
  if (a.final_state) keep_state(at, head, W1, W2, b1, b2);
}

// A matrix's gradient D in shared memory, of which a thread meets its own tile alone.
// D += sum over n of x[n] y[n]^T; then columns += D^T at_rows, and D at_columns of the own row is returned.
template <int N>
__device__ float visit(const Place& at, float4* D, const float (&x)[N], const float* const (&y)[N],
                       float at_rows, const float* at_columns, float (&columns)[kColumns]) {
  float r[N][kRows], s[kRows] = {}, read[kRows];
  at.rows(at_rows, read);
#pragma unroll
  for (int n = 0; n < N; ++n) at.rows(x[n], r[n]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 by = at.columns(at_columns, half);
    float4 add[N];
#pragma unroll
    for (int n = 0; n < N; ++n) add[n] = at.columns(y[n], half);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float4& place = D[(i * 2 + half) * kThreads + threadIdx.x];
      float4 d = place;
#pragma unroll
      for (int n = 0; n < N; ++n)
        d.x += r[n][i] * add[n].x, d.y += r[n][i] * add[n].y, d.z += r[n][i] * add[n].z,
            d.w += r[n][i] * add[n].w;
      place = d;
      columns[half * 4] += d.x * read[i], columns[half * 4 + 1] += d.y * read[i];
      columns[half * 4 + 2] += d.z * read[i], columns[half * 4 + 3] += d.w * read[i];
      s[i] += d.x * by.x + d.y * by.y + d.z * by.z + d.w * by.w;
    }
  }
  return at.own_sum(s);
}

constexpr int kTileVectors = kRows * kColumns / 4;
constexpr size_t kGradientBytes = size_t{2} * kTileVectors * kThreads * sizeof(float4);

// What the warps share of a token.
struct Slot {
  alignas(16) float q[kWide], k[kWide], v[kWide], d_o[kWide], e[kWide], zhat[kWide], da2[kWide], dz2[kWide],
      dd[kWide];
  float r_z, eta;
  int opens;
};

// The weights after token t of its document, from the writes up to it.
template <class T>
__device__ void replay(const Place& at, const Head<T>& head, Tile& W1, Tile& W2, int64_t t) {
  const TttArgs<T>& a = head.a;
  const int64_t first = a.start ? a.start[head.b * a.T_len + t] : 0;
  const int row = at.own_row();
  head.initial(at, W1, W2, head.state_at(first));
  for (int64_t s = first; s <= t; ++s) {
    const float *record = head.record(s), eta = a.rate * a.beta[head.token(s)];
    const Gelu<float> x1(row < a.M ? record[row] : 0.f);
    const float f = (row < a.M ? record[a.M + row] : 0.f) * x1.slope;
    float e[kColumns], k[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int c = at.column(j);
      e[j] = c < a.K ? record[3 * a.M + 2 * a.K + c] : 0.f;
      k[j] = c < a.K ? load(a.k + head.token(s) * a.K + c) : 0.f;
    }
    add_outer(at, W2, -eta * x1.value, e), add_outer(at, W1, -eta * f, k);
  }
}

// The reverse pass of one head. Warp 0 goes through the layer norm of the write, warp 1 stores dq and dk,
// warp 2 makes ready the token to come, all between the same two barriers.
template <class T>
struct Backward {
  const TttArgs<T>& a;
  const TttGrads<T>& g;
  float4* const D;  // gradient of W1, then of W2
  Slot (&slots)[2];
  Vectors (&parts)[3];  // of the gradients of e, q, k
  float (&along)[kWarps];
  const Place at = {};
  const Head<T> head{a};
  const Norm norm{a.K};
  const float2 gamma = norm.load(a.norm_weight + head.h * a.K), bias = norm.load(a.norm_bias + head.h * a.K);
  const int row = at.own_row();
  float4* const D2 = D + kTileVectors * kThreads;
  float* const out = g.partial + head.i * (a.P() + 2 * a.K);
  Tile W1, W2;
  float db1 = 0, z1 = 0, h = 0, a1 = 0;
  float last_dh = 0, last_x1 = 0, last_dz1 = 0;  // what the token before owes D
  float2 db2 = {}, dgamma = {}, dbias = {};
  bool ended = true, first_export = true;  // token t + 1 opened a document

  // One warp's part, ahead of the token: its vectors, and da2.
  struct Ahead {
    float2 q, k, v, d_o, e, zhat, ahat;
    float r_z, r_a, eta;
    int opens;
  };

  __device__ void fetch_rows(int64_t t) {
    if (t < 0 || row >= a.M) return;
    const float* const record = head.record(t);
    z1 = record[row], h = record[a.M + row], a1 = record[2 * a.M + row];
  }
  __device__ void fetch(Ahead& x, int64_t t) {
    const float* const record = head.record(t) + 3 * a.M;
    const int64_t from = head.token(t) * a.K;
    x.q = norm.load(a.q + from), x.k = norm.load(a.k + from), x.v = norm.load(a.v + from);
    x.d_o = norm.load(g.d_o + from), x.zhat = norm.load(record), x.ahat = norm.load(record + a.K);
    x.e = norm.load(record + 2 * a.K), x.r_z = record[3 * a.K], x.r_a = record[3 * a.K + 1];
    x.eta = a.rate * a.beta[head.token(t)], x.opens = a.opens_document(head.b, t);
  }
  __device__ void prepare(Slot& s, const Ahead& x) {
    pair_of(s.q) = x.q, pair_of(s.k) = x.k, pair_of(s.v) = x.v, pair_of(s.d_o) = x.d_o;
    pair_of(s.e) = x.e, pair_of(s.zhat) = x.zhat;
    pair_of(s.da2) = norm.through(gamma * x.d_o, x.ahat, x.r_a);
    s.r_z = x.r_z, s.eta = x.eta, s.opens = x.opens;
    dgamma = dgamma + x.d_o * x.ahat, dbias = dbias + x.d_o;
  }
  // The reverse of e(z2), by one warp: dz2, and through d = gamma zhat + bias + k - v the rest.
  __device__ void reverse_error(Slot& s, int64_t t) {
    const float2 zhat = pair_of(s.zhat), e = pair_of(s.e);
    db2 = db2 + pair_of(s.da2);
    const float2 u = total(parts[0]) - s.eta * db2, eb = e * db2;
    const float sum = warp_sum((at.lane < kWarps ? along[at.lane] : 0.f) + eb.x + eb.y);
    if (at.lane == 0) g.dbeta[head.token(t)] = -a.rate * sum;
    const float2 d = gamma * zhat + bias + pair_of(s.k) - pair_of(s.v), p = gamma * d;
    const float2 dp = norm.through(u, zhat, s.r_z), dd = gamma * dp;
    const float2 dzhat = gamma * dd - s.r_z * (norm.mean(p * zhat) * u + norm.mean(u * zhat) * p);
    const float2 dz2 = norm.through(dzhat, zhat, s.r_z) - s.r_z * norm.mean(u * e) * zhat;
    dgamma = dgamma + dp * d + dd * zhat, dbias = dbias + dd, db2 = db2 + dz2;
    pair_of(s.dz2) = dz2, pair_of(s.dd) = dd;
    norm.store(g.dv + head.token(t) * a.K, -1.f * dd);
  }
  // D, with what the token still owes it, to the head's gradients; then D = 0.
  __device__ void export_gradient(const Slot& s) {
    float unread[kColumns] = {};
    const float x2[] = {last_dh, last_x1}, x1[] = {last_dz1};
    const float *const y2[] = {s.e, s.dz2}, *const y1[] = {s.k};
    visit(at, D2, x2, y2, 0.f, s.e, unread), visit(at, D, x1, y1, 0.f, s.k, unread);
    const auto add = [&](float x, int64_t j, bool inside, bool own = true) {
      if (inside && own) out[j] = first_export ? x : out[j] + x;
    };
    for (int v = 0; v < kTileVectors; ++v) {
      float4 &d1 = D[v * kThreads + threadIdx.x], &d2 = D2[v * kThreads + threadIdx.x];
      const float w1[] = {d1.x, d1.y, d1.z, d1.w}, w2[] = {d2.x, d2.y, d2.z, d2.w};
      d1 = d2 = {};
      const int r = at.row(v / 2);
      for (int j = 0; j < 4; ++j) {
        const int c = at.column(v % 2 * 4 + j);
        const bool inside = r < a.M && c < a.K;
        add(w1[j], head.at_W1(r, c), inside), add(w2[j], head.at_W2(r, c), inside);
      }
    }
    head.biases(at, db1, db2, add);
    db1 = last_dh = last_x1 = last_dz1 = 0, db2 = {}, first_export = false;
  }
  __device__ void token(int64_t t) {
    Slot &now = slots[t % 2], &other = slots[(t + 1) % 2];  // other: token t + 1, then t - 1
    const float eta = now.eta, old_h = h;
    if (t == a.T_len - 1)
      head.initial(at, W1, W2, g.last_state);
    else if (ended)
      replay(at, head, W1, W2, t);
    const Gelu<float> x1(z1), c1(a1);
    const float f = h * x1.slope;
    // The read, and what token t + 1 still owes.
    const float da1 = times(at, W2, now.da2) * c1.slope;
    sum_transposed(at, parts[1][at.warp], W1, da1);
    db1 += da1;
    float dk[kColumns] = {}, u[kColumns] = {};
    const float x2[] = {c1.value, last_dh, last_x1}, xs[] = {da1, last_dz1};
    const float *const y2[] = {now.da2, other.e, other.dz2}, *const ys[] = {now.q, other.k};
    const float D2e = visit(at, D2, x2, y2, x1.value, now.e, u);
    const float D1k = visit(at, D, xs, ys, f, now.k, dk) + db1;
    // The weights before the write.
    add_outer(at, W2, eta * x1.value, now.e), add_outer(at, W1, eta * f, now.k);
    const float df = -eta * D1k, dh = df * x1.slope;
    const float both = warp_sum(at.first_copy() ? x1.value * D2e + f * D1k : 0.f);
    if (at.lane == 0) along[at.warp] = both;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) u[j] *= -eta, dk[j] *= -eta;
    add_transposed(at, u, W2, dh);
    at.sum_columns(parts[0][at.warp], u);
    Ahead x;
    if (at.warp == 2 && t > 0) fetch(x, t - 1);
    __syncthreads();
    if (at.warp == 0) reverse_error(now, t);
    if (at.warp == 1) {
      norm.store(g.dq + head.token(t) * a.K, pair_of(now.d_o) + total(parts[1]));
      if (t + 1 < a.T_len) norm.store(g.dk + head.token(t + 1) * a.K, pair_of(other.dd) + total(parts[2]));
    }
    if (at.warp == 2 && t > 0) prepare(other, x);
    fetch_rows(t - 1);
    __syncthreads();
    const float dx1 = times(at, W2, now.dz2) - eta * D2e;
    last_dz1 = df * old_h * x1.bend + dx1 * x1.slope, last_dh = dh, last_x1 = x1.value;
    db1 += last_dz1;
    add_transposed(at, dk, W1, last_dz1);
    at.sum_columns(parts[2][at.warp], dk);
    ended = now.opens;
    if (ended) export_gradient(now);
  }
  __device__ void run() {
    for (int v = 0; v < 2 * kTileVectors; ++v) D[v * kThreads + threadIdx.x] = {};
    for (int v = threadIdx.x; v < static_cast<int>(sizeof slots / 4); v += kThreads)
      reinterpret_cast<float*>(slots)[v] = 0;
    __syncthreads();
    fetch_rows(a.T_len - 1);
    if (at.warp == 2) {
      Ahead x;
      fetch(x, a.T_len - 1), prepare(slots[(a.T_len - 1) % 2], x);
    }
    __syncthreads();
    for (int64_t t = a.T_len - 1; t >= 0; --t) token(t);
    __syncthreads();
    if (at.warp == 1) norm.store(g.dk + head.token(0) * a.K, pair_of(slots[0].dd) + total(parts[2]));
    if (at.warp == 2) pair_of(slots[1].q) = dgamma, pair_of(slots[1].k) = dbias;
    __syncthreads();
    if (at.warp != 0) return;
    norm.store(out + a.P(), dgamma + pair_of(slots[1].q));
    norm.store(out + a.P() + a.K, dbias + pair_of(slots[1].k));
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(TttArgs<T> a, TttGrads<T> g) {
  extern __shared__ float4 D[];
  __shared__ Slot slots[2];
  __shared__ alignas(16) Vectors parts[3];
  __shared__ float along[kWarps];
  Backward<T>{a, g, D, slots, parts, along}.run();
}

// The batch rows' gradients in order.
template <class T>
__global__ void add_rows_kernel(TttArgs<T> a, TttGrads<T> g) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, Q = a.P() + 2 * a.K;
  if (at >= a.H * Q) return;
  float sum = 0;
  for (int64_t b = 0; b < a.B; ++b) sum += g.partial[b * a.H * Q + at];
  if (float* const to = g.target(at / Q, at % Q, a.K, a.M)) *to += sum;
}

}  // namespace

template <class T>
void ttt_forward(const TttArgs<T>& a) {
  PRISM_CHECK(a.K <= kWide && a.M <= kHidden, "ttt: heads of ", a.K, " with ", a.M, " hidden units, at most ",
              kWide, " and ", kHidden, " fit on chip");
  if (a.B * a.H * a.T_len == 0) return;
  forward_kernel<<<grid_for(a.B * a.H, 1), kThreads, 0, stream()>>>(a);
  CUDA_CHECK_LAUNCH();
}

template <class T>
void ttt_backward(const TttArgs<T>& a, const TttGrads<T>& g) {
  TttArgs<T> recording = a;
  recording.o = nullptr, recording.final_state = g.last_state;
  ttt_forward(recording);
  if (a.B * a.H * a.T_len == 0) return;
  const auto kernel = backward_kernel<T>;
  allow_shared_memory(kernel);
  kernel<<<grid_for(a.B * a.H, 1), kThreads, kGradientBytes, stream()>>>(a, g);
  add_rows_kernel<<<grid_for(a.H * (a.P() + 2 * a.K), 256), 256, 0, stream()>>>(a, g);
  CUDA_CHECK_LAUNCH();
}

PRISM_ON_CUDA(ttt_forward);
PRISM_ON_CUDA(ttt_backward);

}  // namespace prism::cuda
