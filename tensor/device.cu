// The CUDA side of tensor/device.h.
#include "tensor/cuda.h"

namespace prism::cuda {

namespace {

__global__ void probe() {}

// Throws one line that says what to do when this process can't use the first card.
void require_card() {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found == cudaErrorInsufficientDriver)
    PRISM_FAIL("cuda: no NVIDIA driver here, or one older than CUDA ", CUDART_VERSION / 1000, ".",
               CUDART_VERSION % 1000 / 10, "; install or update it, or use --device cpu");
  if (found == cudaErrorNoDevice || (found == cudaSuccess && count == 0))
    PRISM_FAIL("cuda: no NVIDIA card is visible (CUDA_VISIBLE_DEVICES?); use --device cpu");
  PRISM_CHECK(found == cudaSuccess, "cuda: ", cudaGetErrorString(found), "; use --device cpu");

  cudaFuncAttributes attributes;
  const cudaError_t loaded = cudaFuncGetAttributes(&attributes, probe);
  if (loaded == cudaErrorNoKernelImageForDevice || loaded == cudaErrorInvalidDeviceFunction ||
      loaded == cudaErrorUnsupportedPtxVersion) {
    cudaDeviceProp card;
    CUDA_CHECK(cudaGetDeviceProperties(&card, 0));
    PRISM_FAIL("cuda: this build has no machine code for ", card.name, " (compute capability ", card.major,
               ".", card.minor, "); build with make CUDA_ARCH=", card.major, card.minor);
  }
  CUDA_CHECK(loaded);
}

Context make_context() {
  require_card();
  constexpr size_t kBlasWorkspace = 32
                                    << 20;  // what cuBLAS recommends for Hopper; fixed, so graphs can hold it
  Context c{};
  cudaDeviceProp card;
  CUDA_CHECK(cudaGetDeviceProperties(&card, 0));
  c.multiprocessors = card.multiProcessorCount;
  c.shared_memory = card.sharedMemPerBlockOptin;
  CUDA_CHECK(cudaStreamCreateWithFlags(&c.stream, cudaStreamNonBlocking));
  CUBLAS_CHECK(cublasCreate(&c.blas));
  CUBLAS_CHECK(cublasSetStream(c.blas, c.stream));
  void* workspace = nullptr;
  CUDA_CHECK(cudaMalloc(&workspace, kBlasWorkspace));
  CUBLAS_CHECK(cublasSetWorkspace(c.blas, workspace, kBlasWorkspace));
  return c;
}

}  // namespace

const Context& context() {
  thread_local const Context c = make_context();
  return c;
}

MemoryInfo memory_info() {
  context();
  MemoryInfo info{};
  CUDA_CHECK(cudaMemGetInfo(&info.free, &info.total));
  return info;
}

void* allocate(size_t bytes) {
  context();
  void* memory = nullptr;
  if (cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
  cudaGetLastError();  // the failure is reported here, not by the next launch
  const MemoryInfo info = memory_info();
  PRISM_FAIL("cuda: ", bytes >> 20, " MiB of memory needed, ", info.free >> 20, " MiB free of ",
             info.total >> 20, "; a smaller --batch or --seq needs less");
}

void release(void* memory) { cudaFree(memory); }

void fill_bytes(void* memory, int value, size_t bytes) {
  CUDA_CHECK(cudaMemsetAsync(memory, value, bytes, stream()));
}

void copy_within(void* to, const void* from, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream()));
}

void copy_in(void* to, const void* from, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream()));
  synchronize();
}

void copy_out(void* to, const void* from, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream()));
  synchronize();
}

void synchronize() { CUDA_CHECK(cudaStreamSynchronize(stream())); }

void capture_begin() { CUDA_CHECK(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal)); }

void* capture_end() {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CUDA_CHECK(cudaStreamEndCapture(stream(), &graph));
  CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  CUDA_CHECK(cudaGraphDestroy(graph));
  return executable;
}

void graph_launch(void* graph) { CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream())); }
void graph_release(void* graph) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

void* mark() {
  cudaEvent_t event = nullptr;
  CUDA_CHECK(cudaEventCreate(&event));
  CUDA_CHECK(cudaEventRecord(event, stream()));
  return event;
}

double milliseconds(void* from, void* to) {
  float elapsed = 0;
  const auto first = static_cast<cudaEvent_t>(from), second = static_cast<cudaEvent_t>(to);
  CUDA_CHECK(cudaEventSynchronize(second));
  CUDA_CHECK(cudaEventElapsedTime(&elapsed, first, second));
  CUDA_CHECK(cudaEventDestroy(first));
  CUDA_CHECK(cudaEventDestroy(second));
  return static_cast<double>(elapsed);
}

std::string describe() {
  context();
  cudaDeviceProp card;
  CUDA_CHECK(cudaGetDeviceProperties(&card, 0));
  return cat(card.name, ", compute capability ", card.major, ".", card.minor);
}

}  // namespace prism::cuda
