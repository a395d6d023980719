// The scan: the one sequence operator of the engine (SPEC sections 1 and 2; paper Eq. 18). Per batch row and
// head, with the state S in R^{V x K},
//
//   S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + sum_{l=1..L} w_{t,l} kappa_{t,l}^T        alpha_t =
//   exp(g_t) o_t = S_t q_t
//
// kernels/README.md derives the chunked forward and reverse pass from this. Linear attention, RetNet,
// Mamba-2, DeltaNet, Gated DeltaNet and PRISM are settings of it.
#pragma once

#include "tensor/dispatch.h"

namespace prism {

template <class T>
struct ScanArgs {
  using A = acc_t<T>;
  // outputs
  T* o = nullptr;            // [B,T,H,V]
  A* final_state = nullptr;  // [B,H,V,K] S_T, or null
  // inputs
  const T* q = nullptr;  // [B,T,H,K] read keys, already scaled
  const T* k = nullptr;  // [B,T,H,K] erase keys
  const T* kappa =
      nullptr;           // [B,T,M,H,K] write keys; M = L - 1 when kappa_1 is k (own_first_key 0), else M = L
  const T* w = nullptr;  // [B,T,L,H,V] write values, their gate multiplied in
  const A* beta = nullptr;           // [B,T,H] erase strength in [0,1]; null: no erasure
  const A* g = nullptr;              // [B,T,H] log decay <= 0; null: no decay
  const A* initial_state = nullptr;  // [B,H,V,K] S_0; null: 0
  const int32_t* start =
      nullptr;          // [B,T] first token of t's document (kernels/documents.h); null: one document
  A* states = nullptr;  // [B,H,N,V,K] scratch, N = ceil(T / C): the state before each chunk. The reverse pass
                        // needs it; the forward pass fills it when it is given
  void* workspace = nullptr;  // cuda: scan_workspace_bytes of scratch, 256-byte aligned
  // sizes
  int64_t B = 0, T_len = 0, H = 0, K = 0, V = 0, L = 1;
  int64_t C = 64;         // chunk size
  int own_first_key = 0;  // 1: kappa holds kappa_1 too

  constexpr int64_t extra_keys() const { return L - 1 + own_first_key; }  // M
  constexpr int64_t chunks() const { return (T_len + C - 1) / C; }        // N
};

// Gradients of the inputs above, each of its input's shape, all overwritten (=). Any may be null where the
// input is null; the others are required.
template <class T>
struct ScanGrads {
  using A = acc_t<T>;
  // outputs
  T* dq = nullptr;
  T* dk = nullptr;
  T* dkappa = nullptr;
  T* dw = nullptr;
  A* dbeta = nullptr;
  A* dg = nullptr;
  A* dinitial_state = nullptr;  // or null when not wanted
  // inputs
  const T* d_o = nullptr;           // [B,T,H,V] gradient of o
  const A* dfinal_state = nullptr;  // [B,H,V,K] gradient of S_T; null: 0
};

// The definition: plain loops, token by token. Every other form is tested against it. CPU only.
namespace cpu {
template <class T>
void scan_recurrence_forward(const ScanArgs<T>& args);
template <class T>
void scan_recurrence_backward(const ScanArgs<T>& args, const ScanGrads<T>& grads);
}  // namespace cpu

// The chunked form, exact for any C.
PRISM_KERNEL(scan_forward, (const ScanArgs<T>& args), (args))
// Recomputes the states before each chunk into args.states (required), then walks the chunks backwards.
PRISM_KERNEL(scan_backward, (const ScanArgs<T>& args, const ScanGrads<T>& grads), (args, grads))

namespace cuda {
template <class T>
size_t scan_workspace_bytes(const ScanArgs<T>& args, bool backward);
}
// Bytes that args.workspace must have for the forward or the backward pass; only the sizes in args are read.
template <class T>
size_t scan_workspace_bytes(Device device, const ScanArgs<T>& args, bool backward) {
  if constexpr (on_cuda<T>)
    if (device == Device::cuda) return cuda::scan_workspace_bytes(args, backward);
  return 0;
}

}  // namespace prism
