#include "kernels/solver.h"

#include "kernels/rows.cuh"

namespace prism::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMostWrites = 8;  // L; the values of a token's writes live in registers

__device__ float normal_cdf(float x) { return 0.5f * (1.f + erff(x * 0.70710678f)); }
__device__ float normal_density(float x) { return 0.39894228f * __expf(-0.5f * x * x); }

// delta of one step; without y (the caller fills it with 1/2) the gain is y itself.
template <int N>
__device__ void step_forward(GainKind kind, const float (&y)[N], const float (&r)[N], const float (&r2)[N],
                             float (&delta)[N]) {
  switch (kind) {
    case GainKind::sigmoid: return each<N>([&](int i) { delta[i] = sigmoid(y[i]) * r[i]; });
    case GainKind::gelu: return each<N>([&](int i) { delta[i] = y[i] * normal_cdf(y[i] * r2[i]) * r[i]; });
    case GainKind::loop: return each<N>([&](int i) { delta[i] = y[i] * r[i] * normal_cdf(y[i] * r[i]); });
    case GainKind::loop_linear: return each<N>([&](int i) { delta[i] = y[i] * r[i]; });
  }
}

// d is ddelta on entry and dr on exit; dr2 += the part through r2.
template <int N>
__device__ void step_backward(GainKind kind, const float (&y)[N], const float (&r)[N], const float (&r2)[N],
                              float (&d)[N], float (&dy)[N], float (&dr2)[N]) {
  switch (kind) {
    case GainKind::sigmoid:
      return each<N>([&](int i) {
        const float p = sigmoid(y[i]);
        dy[i] = d[i] * r[i] * p * (1.f - p);
        d[i] *= p;
      });
    case GainKind::gelu:
      return each<N>([&](int i) {
        const float z = y[i] * r2[i], phi = normal_cdf(z), slope = y[i] * normal_density(z), dp = d[i] * r[i];
        dy[i] = dp * (phi + slope * r2[i]);
        dr2[i] += dp * slope * y[i];
        d[i] *= y[i] * phi;
      });
    case GainKind::loop:
      return each<N>([&](int i) {
        const float z = y[i] * r[i], dz = d[i] * (normal_cdf(z) + z * normal_density(z));
        dy[i] = dz * r[i];
        d[i] = dz * y[i];
      });
    case GainKind::loop_linear:
      return each<N>([&](int i) {
        dy[i] = d[i] * r[i];
        d[i] *= y[i];
      });
  }
}

// sigmoid of gate l >= 1 of a token, before the scale.
template <class T>
__device__ float confidence(const SolverArgs<T>& a, int64_t token, int64_t l, int64_t h) {
  const int64_t c = (l - 1) * a.H + h;
  return sigmoid(load(a.gate[token] + c) + (a.gate_bias ? a.gate_bias[c] : 0.f));
}
template <class T>
__device__ float scale_of(const SolverArgs<T>& a, int64_t l, int64_t h) {
  return l > 0 && a.scale ? a.scale[(l - 1) * a.H + h] : 1.f;
}
template <class T>
__device__ float factor_of(const SolverArgs<T>& a, int64_t token, int64_t l, int64_t h) {
  return l == 0 ? a.beta[token * a.H + h] : confidence(a, token, l, h) * scale_of(a, l, h);
}

// The step that makes write l, or -1: the write is v itself.
template <class T>
__device__ int64_t step_of(const SolverArgs<T>& a, int64_t l) {
  return a.first_is_step ? l : l - 1;
}

// A vector's v, residual before the first step, and the y of each write's step.
template <int N, int kMaxL, class T>
struct Inputs {
  float v[N], r[N];
  Packed<N, T> y[kMaxL];
  bool with_y;

  __device__ Inputs(const SolverArgs<T>& a, int64_t token, int64_t h, int64_t c) : with_y(a.y) {
    load_n<N>(a.v[token] + h * a.V + c, v);
#pragma unroll
    for (int l = 0; l < kMaxL; ++l)
      if (with_y && l < a.L && step_of(a, l) >= 0)
        y[l].load(a.y[token] + (step_of(a, l) * a.H + h) * a.V + c);
    each<N>([&](int i) { r[i] = 0.f; });
    if (a.anchor) load_n<N>(a.anchor[token] + h * a.V + c, r);
    each<N>([&](int i) { r[i] = v[i] - r[i]; });
  }
  __device__ void gain(int l, float (&out)[N]) const {
    each<N>([&](int i) { out[i] = 0.5f; });
    if (with_y) y[l].unpack(out);
  }
};

// Team per token and head; each lane runs the whole chain of its vectors.
template <int N, int kMaxL, class T>
__global__ void solver_forward_kernel(SolverArgs<T> a, GainKind kind, int lanes) {
  const unsigned H = static_cast<unsigned>(a.H), h = blockIdx.x % H, block = blockIdx.x / H;
  const int64_t token = (static_cast<int64_t>(block) * blockDim.x + threadIdx.x) / lanes;
  if (token >= a.n) return;
  for (int64_t c = threadIdx.x % lanes * N; c < a.V; c += lanes * N) {
    const Inputs<N, kMaxL, T> in(a, token, h, c);
    float r[N], y[N], delta[N];
    each<N>([&](int i) { r[i] = in.r[i], delta[i] = in.v[i]; });
#pragma unroll
    for (int l = 0; l < kMaxL; ++l) {
      if (l >= a.L) break;
      if (step_of(a, l) >= 0) {
        in.gain(l, y);
        step_forward(kind, y, r, in.r, delta);
        if (a.retain) each<N>([&](int i) { r[i] -= delta[i]; });
      }
      const float factor = factor_of(a, token, l, h);
      float w[N];
      each<N>([&](int i) { w[i] = factor * delta[i]; });
      store_n<N>(a.w + ((token * a.L + l) * a.H + h) * a.V + c, w);
    }
  }
}

// A block takes a tile of tokens and one head. A lane recomputes the residuals, then walks the steps
// backwards.
template <int N, int kMaxL, class T>
__global__ void solver_backward_kernel(SolverArgs<T> a, SolverGrads<T> g, GainKind kind, int lanes) {
  const unsigned H = static_cast<unsigned>(a.H), h = blockIdx.x % H;
  const int64_t tile = blockIdx.x / H;
  const int team = static_cast<int>(threadIdx.x) / lanes, teams = static_cast<int>(blockDim.x) / lanes;
  float dbias[kMaxL] = {}, dscale[kMaxL] = {};
  for (int i = team; i < kSumTile; i += teams) {
    const int64_t token = tile * kSumTile + i;
    const bool live = token < a.n;
    float along[kMaxL] = {};  // <dw_l, delta_l>
    for (int64_t c = threadIdx.x % lanes * N; live && c < a.V; c += lanes * N) {
      const Inputs<N, kMaxL, T> in(a, token, h, c);
      Packed<N, T> dw[kMaxL];
#pragma unroll
      for (int l = 0; l < kMaxL; ++l)
        if (l < a.L) dw[l].load(g.dw + ((token * a.L + l) * a.H + h) * a.V + c);
      float r[kMaxL][N], delta[N], y[N], d[N], u[N], dr[N] = {}, dr2[N] = {}, dv[N] = {};
      each<N>([&](int k) { r[0][k] = in.r[k]; });  // r[l]: the residual before the step of write l
#pragma unroll
      for (int l = 0; l + 1 < kMaxL; ++l) {
        each<N>([&](int k) { delta[k] = 0.f; });
        in.gain(l, y);
        if (a.retain && l + 1 < a.L && step_of(a, l) >= 0) step_forward(kind, y, r[l], in.r, delta);
        each<N>([&](int k) { r[l + 1][k] = r[l][k] - delta[k]; });
      }
#pragma unroll
      for (int l = kMaxL - 1; l >= 0; --l) {
        if (l >= a.L) continue;
        dw[l].unpack(u);
        const float factor = factor_of(a, token, l, h);
        if (step_of(a, l) < 0) {
          each<N>([&](int k) {
            along[l] += u[k] * in.v[k];
            dv[k] = factor * u[k];
          });
          continue;
        }
        in.gain(l, y);
        step_forward(kind, y, r[l], in.r, delta);
        each<N>([&](int k) {
          along[l] += u[k] * delta[k];
          d[k] = factor * u[k] - (a.retain ? dr[k] : 0.f);  // r_{l+1} = r_l - delta_l
        });
        step_backward(kind, y, r[l], in.r, d, u, dr2);
        each<N>([&](int k) { dr[k] += d[k]; });
        if (g.dy) store_n<N>(g.dy[token] + (step_of(a, l) * a.H + h) * a.V + c, u);
      }
      each<N>([&](int k) {
        dr[k] += dr2[k];
        dv[k] += dr[k];
        dr[k] = -dr[k];
      });
      store_n<N>(g.dv[token] + h * a.V + c, dv);
      if (a.anchor) store_n<N>(g.danchor[token] + h * a.V + c, dr);
    }
#pragma unroll
    for (int l = 0; l < kMaxL; ++l) {
      if (l >= a.L) break;
      along[l] = team_sum(along[l], lanes);
      if (!live || threadIdx.x % lanes != 0) continue;
      if (l == 0) {
        g.dbeta[token * a.H + h] = along[0];
        continue;
      }
      const float beta = confidence(a, token, l, h),
                  dgate = along[l] * scale_of(a, l, h) * beta * (1.f - beta);
      store(g.dgate[token] + (l - 1) * a.H + h, dgate);
      dbias[l] += dgate;
      dscale[l] += along[l] * beta;
    }
  }
  // The teams' sums in order.
  __shared__ float sums[2][kMaxL][kThreads];
  if (threadIdx.x % lanes == 0)
    each<kMaxL>([&](int l) { sums[0][l][team] = dbias[l], sums[1][l][team] = dscale[l]; });
  __syncthreads();
  const int kind_of_sum = threadIdx.x / kMaxL, l = threadIdx.x % kMaxL;
  if (kind_of_sum > 1 || l == 0 || l >= a.L) return;
  float sum = 0;
  for (int i = 0; i < teams; ++i) sum += sums[kind_of_sum][l][i];
  g.partial[((tile * 2 + kind_of_sum) * (a.L - 1) + l - 1) * a.H + h] = sum;
}

// A team per head of a token: y = x / |x|, or dx = (dy - x <x, dy> / |x|^2) / |x| when dy is given (y is dx
// then).
template <int N, int S, class T>
__global__ void l2norm_kernel(Rows<T> y, Rows<const T> dy, Rows<const T> x, int64_t n, unsigned heads,
                              int64_t width, int lanes) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  const int64_t token = at / heads, offset = at % heads * width;
  const Team<N, S> team(lanes, token < n ? width : 0);
  Packed<N, T> in[S], back[S];
  float v[N], d[N], square = 0, along = 0;
  const auto load = [&](int64_t pass) {
    team.load(x[token] + offset, pass, in);
    if (dy) team.load(dy[token] + offset, pass, back);
  };
  for (int64_t pass = 0; pass < width; pass += team.step()) {
    load(pass);
    team.vectors(pass, [&](int s, int64_t) {
      in[s].unpack(v);
      each<N>([&](int i) { square += v[i] * v[i]; });
      if (!dy) return;
      back[s].unpack(d);
      each<N>([&](int i) { along += v[i] * d[i]; });
    });
  }
  const float inverse = rsqrtf(team_sum(square, lanes) + static_cast<float>(kL2NormEps));
  along = dy ? team_sum(along, lanes) * inverse * inverse : 0.f;
  for (int64_t pass = 0; pass < width; pass += team.step()) {
    if (!team.one_pass()) load(pass);
    team.vectors(pass, [&](int s, int64_t column) {
      in[s].unpack(v);
      each<N>([&](int i) { d[i] = v[i]; });
      if (dy) {
        back[s].unpack(d);
        each<N>([&](int i) { d[i] -= v[i] * along; });
      }
      each<N>([&](int i) { d[i] *= inverse; });
      store_n<N>(y[token] + offset + column, d);
    });
  }
}

template <class T>
void l2norm(Rows<T> y, Rows<const T> dy, Rows<const T> x, int64_t n, int64_t heads, int64_t width) {
  if (n * heads == 0) return;
  with_team<T, 4>(aligned(y, dy, x), width, [&](auto N, auto S, int lanes) {
    l2norm_kernel<N, S><<<grid_for(n * heads * lanes, kThreads), kThreads, 0, stream()>>>(
        y, dy, x, n, static_cast<unsigned>(heads), width, lanes);
  });
  CUDA_CHECK_LAUNCH();
}

// Calls fn(Int<N>, Int<kMaxL>, the gain to compute, lanes).
template <class T, class Fn>
void with_chain(const SolverArgs<T>& a, bool rows_aligned, Fn&& fn) {
  PRISM_CHECK(a.L <= kMostWrites, "solver: rank ", a.L, ", expected at most ", kMostWrites, " on cuda");
  const bool plain_half = !a.y && a.gain != GainKind::loop;  // p = 1/2
  const GainKind kind = plain_half ? GainKind::loop_linear : a.gain;
  with_vectors<T>(rows_aligned, a.V, [&](auto N) {
    if (a.L <= 3)
      fn(N, Int<3>{}, kind, team_lanes(a.V, N, 1));
    else
      fn(N, Int<kMostWrites>{}, kind, team_lanes(a.V, N, 1));
  });
  CUDA_CHECK_LAUNCH();
}

}  // namespace

template <class T>
void solver_forward(const SolverArgs<T>& a) {
  if (a.n == 0) return;
  with_chain(a, aligned(a.w, a.v, a.y, a.anchor), [&](auto N, auto kMaxL, GainKind kind, int lanes) {
    const int64_t blocks = ceil_div(a.n * lanes, kThreads) * a.H;
    solver_forward_kernel<N, kMaxL><<<grid_for(blocks, 1), kThreads, 0, stream()>>>(a, kind, lanes);
  });
}

template <class T>
void solver_backward(const SolverArgs<T>& a, const SolverGrads<T>& g) {
  const int64_t tiles = sum_tiles(a.n);
  if (tiles == 0) return;
  with_chain(a, aligned(g.dv, g.dy, g.danchor, g.dw) && aligned(a.v, a.y, a.anchor),
             [&](auto N, auto kMaxL, GainKind kind, int lanes) {
               solver_backward_kernel<N, kMaxL>
                   <<<grid_for(tiles * a.H, 1), kThreads, 0, stream()>>>(a, g, kind, lanes);
             });
  add_tiles(g.partial, tiles, 2, (a.L - 1) * a.H, g.dgate_bias, g.dscale);
}

template <class T>
void l2norm_forward(Rows<T> y, Rows<const T> x, int64_t n, int64_t heads, int64_t width) {
  l2norm<T>(y, {}, x, n, heads, width);
}
template <class T>
void l2norm_backward(Rows<T> dx, Rows<const T> dy, Rows<const T> x, int64_t n, int64_t heads, int64_t width) {
  l2norm<T>(dx, dy, x, n, heads, width);
}

#define PRISM_INSTANTIATE(T)                                                       \
  template void solver_forward(const SolverArgs<T>&);                              \
  template void solver_backward(const SolverArgs<T>&, const SolverGrads<T>&);      \
  template void l2norm_forward(Rows<T>, Rows<const T>, int64_t, int64_t, int64_t); \
  template void l2norm_backward(Rows<T>, Rows<const T>, Rows<const T>, int64_t, int64_t, int64_t)
PRISM_INSTANTIATE(float);
PRISM_INSTANTIATE(bf16);

}  // namespace prism::cuda
