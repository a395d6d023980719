#include "kernels/solver.h"

#include "kernels/scalars.cuh"

namespace prism::cuda {

namespace {

constexpr int kThreads = 256, kBackThreads = 128;
constexpr int kMostWrites = 8;  // L; the values of a token's writes live in registers

__device__ float normal_density(float x) { return 0.39894228f * fast_exp(-0.5f * x * x); }

// From ddelta: dr (returned), dy, and dr2 += the part through r2.
__device__ float step_backward(GainKind kind, float y, float r, float r2, float ddelta, float& dy,
                               float& dr2) {
  switch (kind) {
    case GainKind::sigmoid: {
      const float p = sigmoid(y);
      dy = ddelta * r * p * (1.f - p);
      return ddelta * p;
    }
    case GainKind::gelu: {
      const float z = y * r2, phi = normal_cdf(z), slope = y * normal_density(z), dp = ddelta * r;
      dy = dp * (phi + slope * r2);
      dr2 += dp * slope * y;
      return ddelta * y * phi;
    }
    case GainKind::loop: {
      const float z = y * r, dz = ddelta * (normal_cdf(z) + z * normal_density(z));
      dy = dz * r;
      return dz * y;
    }
    case GainKind::loop_linear: break;
  }
  dy = ddelta * r;
  return ddelta * y;
}

// What the compiler knows of a chain: the gain of its steps (an int of GainKind), or all of the default
// mixer's settings at an exact rank, or nothing.
constexpr int kDefault = 4, kAny = 5;

template <int kL, int kKnown, class T>
struct Chain {
  static constexpr bool known = kKnown == kDefault;
  SolverArgs<T> a;
  GainKind any;

  __device__ int64_t L() const { return known ? kL : a.L; }
  __device__ GainKind kind() const {
    if constexpr (kKnown == kAny) return any;
    return known ? GainKind::sigmoid : static_cast<GainKind>(kKnown);
  }
  __device__ bool with_y() const { return known || a.y; }
  __device__ bool with_anchor() const { return !known && a.anchor; }
  __device__ bool retain() const { return known || a.retain; }
  // The step that makes write l, or -1: the write is v itself.
  __device__ int64_t step_of(int64_t l) const { return !known && a.first_is_step ? l : l - 1; }
};

// What the writes of one token and head are multiplied by: beta_l, and the scale.
template <int kL>
struct Factors {
  float beta[kL], scale[kL];
  template <class C>
  __device__ Factors(const C& chain, int64_t token, int64_t h) {
    const auto& a = chain.a;
#pragma unroll
    for (int l = 0; l < kL; ++l) {
      if (l >= chain.L()) break;
      const int64_t c = (l - 1) * a.H + h;
      scale[l] = l > 0 && a.scale ? a.scale[c] : 1.f;
      beta[l] = l == 0 ? a.beta[token * a.H + h]
                       : sigmoid(load(a.gate[token] + c) + (a.gate_bias ? a.gate_bias[c] : 0.f));
    }
  }
};

// A vector of v, the anchor, and the y of each write's step.
template <int N, int kL, int kKnown, class T>
struct Inputs {
  Packed<N, T> v, anchor, y[kL];

  __device__ Inputs(const Chain<kL, kKnown, T>& chain, int64_t token, int64_t h, int64_t c) {
    const auto& a = chain.a;
    v.load(a.v[token] + h * a.V + c);
    anchor.clear();
    if (chain.with_anchor()) anchor.load(a.anchor[token] + h * a.V + c);
#pragma unroll
    for (int l = 0; l < kL; ++l)
      if (chain.with_y() && l < chain.L() && chain.step_of(l) >= 0)
        y[l].load(a.y[token] + (chain.step_of(l) * a.H + h) * a.V + c);
  }
};

// A team per token and head. A lane reads all inputs of a vector, then runs the chain number by number.
template <int N, int kL, int kKnown, class T>
__global__ void __launch_bounds__(kThreads, kL <= 3 ? 4 : 2)
    solver_forward_kernel(Chain<kL, kKnown, T> chain, int lanes) {
  const auto& a = chain.a;
  const unsigned H = static_cast<unsigned>(a.H), h = blockIdx.x % H, block = blockIdx.x / H;
  const int64_t token = (static_cast<int64_t>(block) * blockDim.x + threadIdx.x) / lanes;
  if (token >= a.n) return;
  const Factors<kL> factors(chain, token, h);
  for (int64_t c = threadIdx.x % lanes * N; c < a.V; c += lanes * N) {
    const Inputs<N, kL, kKnown, T> in(chain, token, h, c);
    Packed<N, T> w[kL];
    each<N>([&](int i) {
      float delta = in.v[i], r = delta - in.anchor[i];
      const float r2 = r;
#pragma unroll
      for (int l = 0; l < kL; ++l) {
        if (l >= chain.L()) break;
        if (chain.step_of(l) >= 0) {
          delta = step_forward(chain.kind(), chain.with_y() ? in.y[l][i] : 0.5f, r, r2);
          if (chain.retain()) r -= delta;
        }
        w[l].set(i, factors.beta[l] * factors.scale[l] * delta);
      }
    });
#pragma unroll
    for (int l = 0; l < kL; ++l)
      if (l < chain.L()) w[l].store(a.w + ((token * chain.L() + l) * a.H + h) * a.V + c);
  }
}

// The reverse of one number: through_v, dr and dr2 gather what reaches v by w_1, by the residuals, and by
// r_2.
template <int N, int kL, int kKnown, class T>
__device__ void walk_back(const Chain<kL, kKnown, T>& chain, const Inputs<N, kL, kKnown, T>& in,
                          const Factors<kL>& factors, const Packed<N, T> (&dw)[kL], int i, float (&along)[kL],
                          Packed<N, T> (&dy)[kL], Packed<N, T>& dv, Packed<N, T>& danchor) {
  const float v = in.v[i], r2 = v - in.anchor[i];
  float y[kL], r[kL], delta[kL], next = r2, dr = 0, dr2 = 0, through_v = 0;
#pragma unroll
  for (int l = 0; l < kL; ++l) {
    if (l >= chain.L()) break;
    y[l] = chain.with_y() && chain.step_of(l) >= 0 ? in.y[l][i] : 0.5f;
    r[l] = next;
    delta[l] = chain.step_of(l) < 0 ? v : step_forward(chain.kind(), y[l], next, r2);
    if (chain.retain() && chain.step_of(l) >= 0) next -= delta[l];
  }
#pragma unroll
  for (int l = kL - 1; l >= 0; --l) {
    if (l >= chain.L()) continue;
    const float d = dw[l][i], ddelta = factors.beta[l] * factors.scale[l] * d;
    along[l] += d * delta[l];
    if (chain.step_of(l) < 0) {
      through_v = ddelta;
      continue;
    }
    float dgain;  // r_{l+1} = r_l - delta_l
    dr += step_backward(chain.kind(), y[l], r[l], r2, ddelta - (chain.retain() ? dr : 0.f), dgain, dr2);
    dy[l].set(i, dgain);
  }
  dv.set(i, through_v + dr + dr2);
  danchor.set(i, -dr - dr2);
}

// A block takes a share of the tokens and one head. A lane reads all inputs of a vector, then number by
// number recomputes the residuals and walks the steps backwards.
template <int N, int kL, int kKnown, class T>
__global__ void __launch_bounds__(kBackThreads, kL <= 3 ? 5 : 2)
    solver_backward_kernel(Chain<kL, kKnown, T> chain, SolverGrads<T> g, int lanes, int64_t share) {
  const auto& a = chain.a;
  const unsigned H = static_cast<unsigned>(a.H), h = blockIdx.x % H;
  const int64_t tile = blockIdx.x / H, end = min((tile + 1) * share, a.n), L = chain.L();
  const int team = static_cast<int>(threadIdx.x) / lanes, teams = static_cast<int>(blockDim.x) / lanes;
  float dbias[kL] = {}, dscale[kL] = {};
  for (int64_t first = tile * share; first < end; first += teams) {
    const int64_t token = min(first + team, end - 1);  // a team without one writes nothing
    const bool live = first + team < end;
    const Factors<kL> factors(chain, token, h);
    float along[kL] = {};  // <dw_l, delta_l>
    for (int64_t c = threadIdx.x % lanes * N; live && c < a.V; c += lanes * N) {
      const Inputs<N, kL, kKnown, T> in(chain, token, h, c);
      Packed<N, T> dw[kL], dy[kL], dv, danchor;
#pragma unroll
      for (int l = 0; l < kL; ++l)
        if (l < L) dw[l].load(g.dw + ((token * L + l) * a.H + h) * a.V + c);
      each<N>([&](int i) { walk_back(chain, in, factors, dw, i, along, dy, dv, danchor); });
      dv.store(g.dv[token] + h * a.V + c);
      if (chain.with_anchor()) danchor.store(g.danchor[token] + h * a.V + c);
#pragma unroll
      for (int l = 0; l < kL; ++l)
        if (chain.with_y() && l < L && chain.step_of(l) >= 0)
          dy[l].store(g.dy[token] + (chain.step_of(l) * a.H + h) * a.V + c);
    }
#pragma unroll
    for (int l = 0; l < kL; ++l) {
      if (l >= L) break;
      along[l] = team_sum(along[l], lanes);
      if (!live || threadIdx.x % lanes != 0) continue;
      if (l == 0) {
        g.dbeta[token * a.H + h] = along[0];
        continue;
      }
      const float beta = factors.beta[l], dgate = along[l] * factors.scale[l] * beta * (1.f - beta);
      store(g.dgate[token] + (l - 1) * a.H + h, dgate);
      dbias[l] += dgate;
      dscale[l] += along[l] * beta;
    }
  }
  // The teams' sums in order.
  __shared__ float sums[2][kL][kBackThreads];
  if (threadIdx.x % lanes == 0)
    each<kL>([&](int l) { sums[0][l][team] = dbias[l], sums[1][l][team] = dscale[l]; });
  __syncthreads();
  const int which = static_cast<int>(threadIdx.x) / kL, l = static_cast<int>(threadIdx.x) % kL;
  if (which > 1 || l == 0 || l >= L) return;
  float sum = 0;
  for (int i = 0; i < teams; ++i) sum += sums[which][l][i];
  g.partial[((tile * 2 + which) * (L - 1) + l - 1) * a.H + h] = sum;
}

// A team per head of a token: y = scale x / |x|, or when dy is given, with dx for y,
// dx = scale / |x| (dy - x <x, dy> / |x|^2).
template <int N, int S, class T>
__global__ void l2norm_kernel(Rows<T> y, Rows<const T> dy, Rows<const T> x, float scale, int64_t n,
                              unsigned heads, int64_t width, int lanes) {
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
  const float factor = scale * inverse;
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
      each<N>([&](int i) { d[i] *= factor; });
      store_n<N>(y[token] + offset + column, d);
    });
  }
}

template <class T>
void l2norm(Rows<T> y, Rows<const T> dy, Rows<const T> x, float scale, int64_t n, int64_t heads,
            int64_t width) {
  if (n * heads == 0) return;
  with_team<T, 4>(aligned(y, dy, x), width, [&](auto N, auto S, int lanes) {
    l2norm_kernel<N, S><<<grid_for(n * heads * lanes, kThreads), kThreads, 0, stream()>>>(
        y, dy, x, scale, n, static_cast<unsigned>(heads), width, lanes);
  });
  CUDA_CHECK_LAUNCH();
}

// Calls fn(Int<N>, Chain, lanes). Ranks up to 3 by vectors have kernels of their own; the others share one.
template <class T, class Fn>
void with_chain(const SolverArgs<T>& a, bool rows_aligned, Fn&& fn) {
  PRISM_CHECK(a.L <= kMostWrites, "solver: rank ", a.L, ", expected at most ", kMostWrites, " on cuda");
  const bool plain_half = !a.y && a.gain != GainKind::loop;  // p = 1/2
  const GainKind kind = plain_half ? GainKind::loop_linear : a.gain;
  const bool is_default =
      (a.L == 1 || kind == GainKind::sigmoid) && !a.first_is_step && !a.anchor && a.retain;
  with_vectors<T>(rows_aligned, a.V, [&](auto N) {
    const int lanes = team_lanes(a.V, N, 1);
    const auto call = [&](auto L, auto known) { fn(N, Chain<L, known, T>{a, kind}, lanes); };
    if (N == 1 || a.L > 3) return call(Int<kMostWrites>{}, Int<kAny>{});
    if constexpr (N > 1) {
      if (is_default && a.L == 1) return call(Int<1>{}, Int<kDefault>{});
      if (is_default && a.L == 2) return call(Int<2>{}, Int<kDefault>{});
      if (is_default) return call(Int<3>{}, Int<kDefault>{});
      if (kind == GainKind::gelu) return call(Int<3>{}, Int<static_cast<int>(GainKind::gelu)>{});
      if (kind == GainKind::loop) return call(Int<3>{}, Int<static_cast<int>(GainKind::loop)>{});
      call(Int<3>{}, Int<kAny>{});
    }
  });
  CUDA_CHECK_LAUNCH();
}

}  // namespace

template <class T>
void solver_forward(const SolverArgs<T>& a) {
  if (a.n == 0) return;
  with_chain(a, aligned(a.w, a.v, a.y, a.anchor), [&](auto N, const auto& chain, int lanes) {
    const int64_t blocks = ceil_div(a.n * lanes, kThreads) * a.H;
    solver_forward_kernel<N><<<grid_for(blocks, 1), kThreads, 0, stream()>>>(chain, lanes);
  });
}

template <class T>
void solver_backward(const SolverArgs<T>& a, const SolverGrads<T>& g) {
  if (a.n == 0) return;
  int64_t tiles = 0;
  with_chain(a, aligned(g.dv, g.dy, g.danchor, g.dw) && aligned(a.v, a.y, a.anchor),
             [&]<int kL, int kKnown>(auto N, const Chain<kL, kKnown, T>& chain, int lanes) {
               const auto kernel = solver_backward_kernel<N, kL, kKnown, T>;
               const int64_t share = rows_a_block(kernel, kBackThreads, 0, a.n, a.H);
               tiles = ceil_div(a.n, share);
               kernel<<<grid_for(tiles * a.H, 1), kBackThreads, 0, stream()>>>(chain, g, lanes, share);
             });
  add_tiles(g.partial, tiles, 2, (a.L - 1) * a.H, g.dgate_bias, g.dscale);
}

template <class T>
void l2norm_forward(Rows<T> y, Rows<const T> x, acc_t<T> scale, int64_t n, int64_t heads, int64_t width) {
  l2norm<T>(y, {}, x, scale, n, heads, width);
}
template <class T>
void l2norm_backward(Rows<T> dx, Rows<const T> dy, Rows<const T> x, acc_t<T> scale, int64_t n, int64_t heads,
                     int64_t width) {
  l2norm<T>(dx, dy, x, scale, n, heads, width);
}

PRISM_ON_CUDA(solver_forward);
PRISM_ON_CUDA(solver_backward);
PRISM_ON_CUDA(l2norm_forward);
PRISM_ON_CUDA(l2norm_backward);

}  // namespace prism::cuda
