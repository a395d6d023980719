#include "kernels/embedding.h"

#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

constexpr int kWarps = 16;       // of a block of the reverse pass
constexpr int kLongRun = kWarp;  // a run of this length or more is shared by its block

template <class T>
struct Lookup {
  static constexpr int kInputs = 1;
  T* x;
  const T* table;
  const int32_t* tokens;
  int64_t D;
  template <int N>
  __device__ void load(int64_t row, int64_t column, float (&in)[1][N]) const {
    load_n<N>(table + tokens[row] * D + column, in[0]);
  }
  template <int N>
  __device__ void finish(int64_t row, int64_t column, float (&in)[1][N]) const {
    store_n<N>(x + row * D + column, in[0]);
  }
};

// The end of the run of equal tokens that begins at `begin`, by the whole warp: every lane tests one position
// of the range, then the range is that between two lanes.
__device__ int64_t run_end(const int32_t* tokens, const int32_t* order, int64_t n, int64_t begin) {
  const int32_t token = tokens[order[begin]];
  int64_t low = begin, step = 1;  // low is in the run; first its next 32 positions, then all that are left
  while (true) {
    const int64_t at = low + step * (threadIdx.x + 1);
    const int inside = __popc(__ballot_sync(0xffffffffu, at < n && tokens[order[at]] == token));
    low += step * inside;
    if (inside < kWarp && step == 1) return low + 1;
    step = inside < kWarp ? ceil_div(step, kWarp) : max(step, ceil_div(n - low, kWarp));
  }
}

// sum += dx[order[i]] for i = begin, begin + step, ... < end, at this lane's channels.
template <int N, class T>
__device__ void add_run(float (&sum)[N], const T* dx, const int32_t* order, int64_t begin, int64_t end,
                        int64_t step, int64_t D) {
  constexpr int kAhead = 8;
  for (int64_t i = begin; i < end; i += kAhead * step) {
    Packed<N, T> x[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t at = i + u * step < end ? i + u * step : i;  // no branch: the loads go out together
      x[u].load(dx + order[at] * D);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      float values[N];
      x[u].unpack(values);
      each<N>([&](int k) { sum[k] += i + u * step < end ? values[k] : 0.f; });
    }
  }
}

// A block owns the runs that begin among its kWarps positions of `order`, at 32 N channels: warp w that of
// position w, unless it is long; then all the warps share it, each every kWarps-th position.
template <int N, class T>
__global__ void embedding_backward_kernel(float* dtable, const T* dx, const int32_t* tokens,
                                          const int32_t* order, int64_t n, int64_t D) {
  __shared__ int64_t ends[kWarps];
  __shared__ float sums[kWarps][kWarp * N];
  const int lane = threadIdx.x, warp = threadIdx.y;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps, mine = first + warp;
  const int64_t channel = (static_cast<int64_t>(blockIdx.y) * kWarp + lane) * N;
  const bool live = channel < D;
  const auto add_to_table = [&](int32_t token, const float(&sum)[N]) {
    float row[N];
    load_n<N>(dtable + token * D + channel, row);
    each<N>([&](int k) { row[k] += sum[k]; });
    store_n<N>(dtable + token * D + channel, row);
  };
  const bool opens = mine < n && (mine == 0 || tokens[order[mine]] != tokens[order[mine - 1]]);
  const int64_t end = opens ? run_end(tokens, order, n, mine) : mine;
  const bool is_long = end - mine >= kLongRun;
  if (lane == 0) ends[warp] = is_long ? end : 0;
  if (opens && !is_long && live) {
    float sum[N] = {};
    add_run(sum, dx + channel, order, mine, end, 1, D);
    add_to_table(tokens[order[mine]], sum);
  }
  __syncthreads();
  for (int owner = 0; owner < kWarps; ++owner) {
    if (ends[owner] == 0) continue;
    float sum[N] = {};
    if (live) add_run(sum, dx + channel, order, first + owner + warp, ends[owner], kWarps, D);
    each<N>([&](int k) { sums[warp][k * kWarp + lane] = sum[k]; });
    __syncthreads();
    if (warp == 0 && live) {
      for (int w = 1; w < kWarps; ++w) each<N>([&](int k) { sum[k] += sums[w][k * kWarp + lane]; });
      add_to_table(tokens[order[first + owner]], sum);
    }
    __syncthreads();
  }
}

}  // namespace

template <class T>
void embedding_forward(T* x, const T* table, const int32_t* tokens, int64_t n, int64_t D) {
  with_vectors<T>(aligned(x, table), D, [&](auto N) { by_rows(N, Lookup<T>{x, table, tokens, D}, n, D); });
}

template <class T>
void embedding_backward(acc_t<T>* dtable, const T* dx, const int32_t* tokens, const int32_t* order, int64_t n,
                        int64_t D) {
  if (n == 0) return;
  with_vectors<T>(aligned(dtable, dx), D, [&](auto N) {
    const dim3 grid(grid_for(n, kWarps), grid_for(D, kWarp * N));
    embedding_backward_kernel<N><<<grid, dim3(kWarp, kWarps), 0, stream()>>>(dtable, dx, tokens, order, n, D);
  });
  CUDA_CHECK_LAUNCH();
}

#define PRISM_INSTANTIATE(T)                                                       \
  template void embedding_forward(T*, const T*, const int32_t*, int64_t, int64_t); \
  template void embedding_backward<T>(float*, const T*, const int32_t*, const int32_t*, int64_t, int64_t)
PRISM_INSTANTIATE(float);
PRISM_INSTANTIATE(bf16);

}  // namespace prism::cuda
