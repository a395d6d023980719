#include "kernels/norm.h"

#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

constexpr int kThreads = 256;
// Blocks a multiprocessor must hold at once, for rows that fit in S vectors a lane.
template <int S, int kUsual>
constexpr int kFewRegisters = S <= kUsual ? 3 : 1;

// A block's column sums: each team adds to sums of its own, then the teams are added in order.
__device__ float* team_sums(int lanes, int64_t width) {
  extern __shared__ float4 shared[];
  float* sums = reinterpret_cast<float*>(shared);
  const int teams = static_cast<int>(blockDim.x) / lanes;
  for (int64_t i = threadIdx.x; i < teams * width; i += blockDim.x) sums[i] = 0.f;
  __syncthreads();
  return sums + threadIdx.x / lanes * width;
}
__device__ void write_sums(float* partial, int lanes, int64_t width) {
  extern __shared__ float4 shared[];
  const float* sums = reinterpret_cast<const float*>(shared);
  const int teams = static_cast<int>(blockDim.x) / lanes;
  __syncthreads();
  for (int64_t c = threadIdx.x; c < width; c += blockDim.x) {
    float sum = 0;
    for (int team = 0; team < teams; ++team) sum += sums[team * width + c];
    partial[blockIdx.x * width + c] = sum;
  }
}

// Launches a kernel whose teams each have `width` sums in shared memory, with fewer threads when rows are
// very wide, and adds the blocks' sums to dweight.
template <class Kernel, class... Args>
void launch_with_sums(Kernel kernel, int64_t n, int64_t width, int lanes, float* partial, float* dweight,
                      const Args&... args) {
  int threads = kThreads;
  const auto shared = [&] { return static_cast<size_t>(threads / lanes * width) * sizeof(float); };
  while (threads > kWarp && shared() > context().shared_memory) threads /= 2;
  PRISM_CHECK(shared() <= context().shared_memory, "norm: rows of ", width, " are too wide for cuda");
  allow_shared_memory(kernel);
  const int64_t share = rows_a_block(kernel, threads, shared(), n), blocks = ceil_div(n, share);
  kernel<<<grid_for(blocks, 1), threads, shared(), stream()>>>(args..., lanes, share);
  CUDA_CHECK_LAUNCH();
  add_tiles(partial, blocks, 1, width, dweight);
}

// One row a team, in registers between the two passes: the sum is read and written once.
template <int N, int S, class T>
__global__ void add_norm_forward_kernel(AddNormArgs<T> a, int lanes) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  const Team<N, S> team(lanes, row < a.n ? a.D : 0);
  const T* sum = a.y ? a.sum + row * a.D : a.x + row * a.D;
  Packed<N, T> x[S], y[S];
  float v[N], w[N], total = 0;
  for (int64_t pass = 0; pass < a.D; pass += team.step()) {
    team.load(a.x + row * a.D, pass, x);
    if (a.y) team.load(a.y + row * a.D, pass, y);
    team.vectors(pass, [&](int s, int64_t column) {
      x[s].unpack(v);
      if (a.y) {
        y[s].unpack(w);
        each<N>([&](int i) { v[i] += w[i]; });
        x[s].pack(v);
        x[s].store(a.sum + row * a.D + column);
        x[s].unpack(v);  // rounded
      }
      each<N>([&](int i) { total += v[i] * v[i]; });
    });
  }
  const float rstd = rsqrtf(team_sum(total, lanes) / a.D + a.eps);
  for (int64_t pass = 0; pass < a.D; pass += team.step()) {
    if (!team.one_pass()) team.load(sum, pass, x);
    team.vectors(pass, [&](int s, int64_t column) {
      x[s].unpack(v), load_n<N>(a.weight + column, w);
      each<N>([&](int i) { v[i] *= rstd * w[i]; });
      store_n<N>(a.xn + row * a.D + column, v);
    });
  }
  if (team.width > 0 && team.lane == 0) a.rstd[row] = rstd;
}

// A block takes a share of the rows, each team every teams-th:
// dsum = dsum_in + rstd (weight dxn - sum rstd^2 mean(weight dxn sum)),   dweight += dxn sum rstd
template <int N, int S, class T>
__global__ void __launch_bounds__(kThreads, kFewRegisters<S, 3>)
    add_norm_backward_kernel(AddNormGrads<T> g, int lanes, int64_t share) {
  float* sums = team_sums(lanes, g.D);
  const int teams = static_cast<int>(blockDim.x) / lanes;
  const int64_t begin = blockIdx.x * share, end = min(begin + share, g.n);
  for (int64_t first = begin; first < end; first += teams) {
    const int64_t row = first + threadIdx.x / lanes, at = row * g.D;
    const Team<N, S> team(lanes, row < end ? g.D : 0);
    const float rstd = row < end ? g.rstd[row] : 0.f;
    Packed<N, T> sum[S], dxn[S], dsum[S];
    const auto load = [&](int64_t pass) {
      team.load(g.sum + at, pass, sum);
      team.load(g.dxn + at, pass, dxn);
      if (g.dsum_in) team.load(g.dsum_in + at, pass, dsum);
    };
    float x[N], d[N], w[N], along = 0;
    for (int64_t pass = 0; pass < g.D; pass += team.step()) {
      load(pass);
      team.vectors(pass, [&](int s, int64_t column) {
        sum[s].unpack(x), dxn[s].unpack(d), load_n<N>(g.weight + column, w);
        each<N>([&](int i) { along += x[i] * w[i] * d[i]; });
      });
    }
    along = team_sum(along, lanes) * rstd * rstd / g.D;
    for (int64_t pass = 0; pass < g.D; pass += team.step()) {
      if (!team.one_pass()) load(pass);
      team.vectors(pass, [&](int s, int64_t column) {
        float dweight[N], out[N];
        sum[s].unpack(x), dxn[s].unpack(d);
        load_n<N>(g.weight + column, w), load_n<N>(sums + column, dweight);
        if (g.xn) {
          each<N>([&](int i) { out[i] = x[i] * (rstd * w[i]); });
          store_n<N>(g.xn + at + column, out);
        }
        if (g.dsum_in) dsum[s].unpack(out);
        each<N>([&](int i) {
          out[i] = (g.dsum_in ? out[i] : 0.f) + rstd * (w[i] * d[i] - x[i] * along);
          dweight[i] += d[i] * x[i] * rstd;
        });
        store_n<N>(g.dsum + at + column, out), store_n<N>(sums + column, dweight);
      });
    }
  }
  write_sums(g.partial, lanes, g.D);
}

// One head of one token a team.
template <int N, int S, class T>
__global__ void gated_norm_forward_kernel(GatedNormArgs<T> a, int lanes) {
  const unsigned H = static_cast<unsigned>(a.H), h = blockIdx.x % H, block = blockIdx.x / H;
  const int64_t token = (static_cast<int64_t>(block) * blockDim.x + threadIdx.x) / lanes;
  const Team<N, S> team(lanes, token < a.n ? a.V : 0);
  const int64_t at = (token * H + h) * a.V;
  const T* gate = a.gate[token] + h * a.V;
  Packed<N, T> o[S], open[S];
  float v[N], u[N], w[N], total = 0;
  for (int64_t pass = 0; pass < a.V; pass += team.step()) {
    team.load(a.o + at, pass, o);
    team.load(gate, pass, open);
    team.vectors(pass, [&](int s, int64_t) {
      o[s].unpack(v);
      each<N>([&](int i) { total += v[i] * v[i]; });
    });
  }
  const float rstd = rsqrtf(team_sum(total, lanes) / a.V + a.eps);
  for (int64_t pass = 0; pass < a.V; pass += team.step()) {
    if (!team.one_pass()) team.load(a.o + at, pass, o), team.load(gate, pass, open);
    team.vectors(pass, [&](int s, int64_t column) {
      o[s].unpack(v), open[s].unpack(u), load_n<N>(a.weight + column, w);
      each<N>([&](int i) { v[i] *= rstd * w[i] * u[i] * sigmoid(u[i]); });
      store_n<N>(a.y + at + column, v);
    });
  }
}

// A block takes a share of the tokens. With n = o rstd and dn = dy SiLU(gate):
// do = rstd (weight dn - n mean(weight dn n)),   dgate = dy n weight SiLU'(gate),   dweight += dn n
template <int N, int S, class T>
__global__ void __launch_bounds__(kThreads, kFewRegisters<S, 2>)
    gated_norm_backward_kernel(GatedNormArgs<T> a, GatedNormGrads<T> g, int lanes, int64_t share) {
  float* sums = team_sums(lanes, a.V);
  const int teams = static_cast<int>(blockDim.x) / lanes, H = static_cast<int>(a.H);
  const int64_t begin = blockIdx.x * share, end = min(begin + share, a.n);
  for (int i = 0; i < (end - begin) * H; i += teams) {
    const int mine = i + static_cast<int>(threadIdx.x) / lanes;
    const int64_t token = begin + mine / H, h = mine % H, at = (token * H + h) * a.V;
    const Team<N, S> team(lanes, token < end ? a.V : 0);
    Packed<N, T> o[S], dy[S], gate[S];
    const auto load = [&](int64_t pass) {
      team.load(a.o + at, pass, o);
      team.load(g.dy + at, pass, dy);
      team.load(a.gate[token] + h * a.V, pass, gate);
    };
    float x[N], d[N], u[N], w[N], total = 0, along = 0;
    for (int64_t pass = 0; pass < a.V; pass += team.step()) {
      load(pass);
      team.vectors(pass, [&](int s, int64_t column) {
        o[s].unpack(x), dy[s].unpack(d), gate[s].unpack(u), load_n<N>(a.weight + column, w);
        each<N>([&](int i) {
          total += x[i] * x[i];
          along += x[i] * w[i] * d[i] * u[i] * sigmoid(u[i]);
        });
      });
    }
    const float rstd = rsqrtf(team_sum(total, lanes) / a.V + a.eps);
    along = team_sum(along, lanes) * rstd * rstd / a.V;
    for (int64_t pass = 0; pass < a.V; pass += team.step()) {
      if (!team.one_pass()) load(pass);
      team.vectors(pass, [&](int s, int64_t column) {
        float dweight[N], y[N];
        o[s].unpack(x), dy[s].unpack(d), gate[s].unpack(u);
        load_n<N>(a.weight + column, w), load_n<N>(sums + column, dweight);
        each<N>([&](int i) {
          const float open = sigmoid(u[i]), dn = d[i] * u[i] * open, n = x[i] * rstd;
          y[i] = x[i] * (rstd * w[i] * u[i] * open);
          u[i] = d[i] * n * w[i] * open * (1.f + u[i] * (1.f - open));
          d[i] = rstd * (w[i] * dn - x[i] * along);
          dweight[i] += dn * n;
        });
        if (a.y) store_n<N>(a.y + at + column, y);
        store_n<N>(g.dgate[token] + h * a.V + column, u), store_n<N>(g.d_o + at + column, d);
        store_n<N>(sums + column, dweight);
      });
    }
  }
  write_sums(g.partial, lanes, a.V);
}

}  // namespace

template <class T>
void add_norm_forward(const AddNormArgs<T>& a) {
  if (a.n == 0) return;
  with_team<T, 3>(aligned(a.sum, a.xn, a.x, a.y, a.weight), a.D, [&](auto N, auto S, int lanes) {
    add_norm_forward_kernel<N, S><<<grid_for(a.n * lanes, kThreads), kThreads, 0, stream()>>>(a, lanes);
  });
  CUDA_CHECK_LAUNCH();
}

template <class T>
void add_norm_backward(const AddNormGrads<T>& g) {
  if (g.n == 0) return;
  with_team<T, 3>(
      aligned(g.dsum, g.xn, g.dsum_in, g.dxn, g.sum, g.weight), g.D, [&](auto N, auto S, int lanes) {
        launch_with_sums(add_norm_backward_kernel<N, S, T>, g.n, g.D, lanes, g.partial, g.dweight, g);
      });
}

template <class T>
void gated_norm_forward(const GatedNormArgs<T>& a) {
  if (a.n == 0) return;
  with_team<T, 2>(aligned(a.y, a.o, a.gate, a.weight), a.V, [&](auto N, auto S, int lanes) {
    const int64_t blocks = ceil_div(a.n * lanes, kThreads) * a.H;
    gated_norm_forward_kernel<N, S><<<grid_for(blocks, 1), kThreads, 0, stream()>>>(a, lanes);
  });
  CUDA_CHECK_LAUNCH();
}

template <class T>
void gated_norm_backward(const GatedNormArgs<T>& a, const GatedNormGrads<T>& g) {
  if (a.n == 0) return;
  with_team<T, 2>(
      aligned(g.d_o, a.y, g.dgate, a.o, a.gate, a.weight, g.dy), a.V, [&](auto N, auto S, int lanes) {
        launch_with_sums(gated_norm_backward_kernel<N, S, T>, a.n, a.V, lanes, g.partial, g.dweight, a, g);
      });
}

PRISM_ON_CUDA(add_norm_forward);
PRISM_ON_CUDA(add_norm_backward);
PRISM_ON_CUDA(gated_norm_forward);
PRISM_ON_CUDA(gated_norm_backward);

}  // namespace prism::cuda
