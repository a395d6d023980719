// A scan problem of src/scan_case.h on the card.
#pragma once

#include "tensor/device.h"
#include "src/scan_case.h"

namespace prism {

// Copies the inputs and poisoned outputs to the card; run() fills data's outputs from there.
template <class T>
class DeviceScan {
 public:
  explicit DeviceScan(ScanData<T>& data) : data_(data), args_(data.args()), grads_(data.grads()) {
    in(args_.q, data.q), in(args_.k, data.k), in(args_.kappa, data.kappa), in(args_.w, data.w);
    in(args_.beta, data.beta), in(args_.g, data.g), in(args_.initial_state, data.initial_state);
    in(args_.start, data.start), in(grads_.d_o, data.d_o), in(grads_.dfinal_state, data.dfinal_state);
    out(args_.o, data.o), out(args_.final_state, data.final_state), out(args_.states, data.states);
    out(grads_.dq, data.dq), out(grads_.dk, data.dk), out(grads_.dkappa, data.dkappa),
        out(grads_.dw, data.dw);
    out(grads_.dbeta, data.dbeta), out(grads_.dg, data.dg), out(grads_.dinitial_state, data.dinitial_state);
    workspace_ = Buffer(Device::cuda, scan_workspace_bytes(Device::cuda, args_, true));
    fill_bytes(Device::cuda, workspace_.data(), 0xff, workspace_.bytes());  // NaN
    args_.workspace = workspace_.data();
  }

  void forward() {
    ScanArgs<T> args = args_;
    args.states = nullptr;
    scan_forward(Device::cuda, args);
  }
  void backward() {
    ScanArgs<T> args = args_;
    args.o = nullptr, args.final_state = nullptr;  // the forward pass has written them
    scan_backward(Device::cuda, args, grads_);
  }
  void fetch() {
    for (const Output& o : outputs_) copy_out(Device::cuda, o.host, o.device, o.bytes);
  }

 private:
  struct Output {
    void* host;
    void* device;
    size_t bytes;
  };
  template <class P, class X>
  void in(P*& pointer, std::vector<X>& host) {
    pointer = nullptr;
    if (host.empty()) return;
    buffers_.emplace_back(Device::cuda, host.size() * sizeof(X));
    copy_in(Device::cuda, buffers_.back().data(), host.data(), buffers_.back().bytes());
    pointer = reinterpret_cast<P*>(buffers_.back().data());
  }
  template <class P, class X>
  void out(P*& pointer, std::vector<X>& host) {
    in(pointer, host);
    if (pointer) outputs_.push_back({host.data(), pointer, host.size() * sizeof(X)});
  }

  ScanData<T>& data_;
  ScanArgs<T> args_;
  ScanGrads<T> grads_;
  std::vector<Buffer> buffers_;
  std::vector<Output> outputs_;
  Buffer workspace_;
};

}  // namespace prism
