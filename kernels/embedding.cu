#include "kernels/embedding.h"

#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

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

// The gradient sums runs of equal tokens in `order`. A run shorter than kLong has one warp, a longer one a
// block for each strip of columns. Each is summed in one order and its row of the table written by one
// thread.
constexpr int64_t kLong = 256;
constexpr int kWarps = 8;       // of a block of short runs
constexpr int kStripLanes = 4;  // of a block of long runs: 64 bytes of a row, two memory sectors
constexpr int kLongThreads = 512;

// A warp takes the run that begins at its position, if one does.
template <int N, int S, class T>
__global__ void __launch_bounds__(kWarps* kWarp)
    short_runs_kernel(float* dtable, const T* dx, const int32_t* tokens, const int32_t* order, int64_t n,
                      int64_t D) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (begin >= n) return;
  const int32_t token = tokens[order[begin]];
  if (begin > 0 && tokens[order[begin - 1]] == token) return;
  if (begin + kLong <= n && tokens[order[begin + kLong - 1]] == token) return;
  const Team<N, S> team(kWarp, D);
  int64_t end = begin;
  for (int inside = kWarp; inside == kWarp; end += inside) {
    const int64_t at = end + team.lane;
    inside = __popc(__ballot_sync(0xffffffffu, at < n && tokens[order[at]] == token));
  }
  for (int64_t pass = 0; pass < D; pass += team.step()) {
    float sum[S][N], x[N];
    team.load(dtable + token * D, pass, sum);
    for (int64_t i = begin; i < end; i += 2) {
      Packed<N, T> even[S], odd[S];
      team.load(dx + order[i] * D, pass, even);
      team.load(dx + order[min(i + 1, end - 1)] * D, pass, odd);
      team.vectors(pass, [&](int s, int64_t) {
        even[s].unpack(x);
        each<N>([&](int k) { sum[s][k] += x[k]; });
        odd[s].unpack(x);
        each<N>([&](int k) { sum[s][k] += i + 1 < end ? x[k] : 0.f; });
      });
    }
    team.store(dtable + token * D, pass, sum);
  }
}

// A run of kLong or more contains multiples of kLong: the block of the first one takes the run, at one strip.
template <int N, class T>
__global__ void __launch_bounds__(kLongThreads)
    long_runs_kernel(float* dtable, const T* dx, const int32_t* tokens, const int32_t* order, int64_t n,
                     int64_t D) {
  const int64_t inside = blockIdx.x * kLong;
  const int me = static_cast<int>(threadIdx.x);
  const int32_t token = tokens[order[inside]];
  const auto same = [&](int64_t at) { return at >= 0 && at < n && tokens[order[at]] == token; };
  if (same(inside - kLong)) return;
  const int64_t begin = inside - __syncthreads_count(me < kLong && same(inside - 1 - me));
  int64_t end = inside + 1;
  for (int64_t step = ceil_div(n - inside, kLongThreads); step > 0;
       step = step > 1 ? ceil_div(step, kLongThreads) : 0)
    end += step * __syncthreads_count(same(end - 1 + step * (me + 1)));
  if (end - begin < kLong) return;

  constexpr int kGroups = kLongThreads / kStripLanes, kAhead = 4;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kStripLanes + me % kStripLanes) * N;
  const int64_t safe_column = column < D ? column : 0;
  float sum[N] = {}, x[N];
  for (int64_t i = begin + me / kStripLanes; i < end; i += kGroups * kAhead) {
    Packed<N, T> rows[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      rows[u].load(dx + order[min(i + u * kGroups, end - 1)] * D + safe_column);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      rows[u].unpack(x);
      each<N>([&](int k) { sum[k] += i + u * kGroups < end ? x[k] : 0.f; });
    }
  }
  // Over the groups: those of a warp by shuffles, then the warps in order.
  __shared__ float sums[kLongThreads / kWarp][kStripLanes][N];
  for (int i = kStripLanes; i < kWarp; i *= 2)
    each<N>([&](int k) { sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], i); });
  if (me % kWarp < kStripLanes) each<N>([&](int k) { sums[me / kWarp][me % kWarp][k] = sum[k]; });
  __syncthreads();
  if (me >= kStripLanes || column >= D) return;
  load_n<N>(dtable + token * D + column, sum);
  for (int w = 0; w < kLongThreads / kWarp; ++w) each<N>([&](int k) { sum[k] += sums[w][me][k]; });
  store_n<N>(dtable + token * D + column, sum);
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
    short_runs_kernel<N, 4>
        <<<grid_for(n, kWarps), kWarps * kWarp, 0, stream()>>>(dtable, dx, tokens, order, n, D);
    CUDA_CHECK_LAUNCH();
    const dim3 grid(grid_for(n, kLong), grid_for(D, kStripLanes * N));
    long_runs_kernel<N><<<grid, kLongThreads, 0, stream()>>>(dtable, dx, tokens, order, n, D);
  });
  CUDA_CHECK_LAUNCH();
}

PRISM_ON_CUDA(embedding_forward);
PRISM_ON_CUDA(embedding_backward);

}  // namespace prism::cuda
