// Random problems for the scan, in host memory, for everything that compares one form of it with another.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/documents.h"
#include "kernels/scan.h"
#include "src/host.h"
#include "tensor/rng.h"

namespace prism {

enum class ScanDecay { none, mild, mixed };  // mixed: 0, -80, -1e4 and -inf among mild ones

struct ScanCase {
  int64_t B = 2, T = 17, H = 2, K = 8, V = 8, L = 1, C = 16;
  int own_first_key = 0;
  bool erase = true;
  ScanDecay decay = ScanDecay::mild;
  bool documents = false;  // boundaries anywhere, with an id that comes back
  bool states = true;      // a non-zero S_0 and gradient of S_T
  uint64_t seed = 1;

  friend std::ostream& operator<<(std::ostream& out, const ScanCase& c) {
    return out << "B " << c.B << " T " << c.T << " H " << c.H << " K " << c.K << " V " << c.V << " L " << c.L
               << " C " << c.C << " own_first_key " << c.own_first_key << " erase " << c.erase << " decay "
               << static_cast<int>(c.decay) << " documents " << c.documents << " states " << c.states
               << " seed " << c.seed;
  }
};

// Inputs and outputs of one case. Outputs start as NaN, so that an element nobody writes is seen.
template <class T>
struct ScanData {
  using A = acc_t<T>;
  ScanCase c;
  std::vector<int32_t> segment, start;
  std::vector<T> q, k, kappa, w, d_o;
  std::vector<A> beta, g, initial_state, dfinal_state;
  std::vector<T> o, dq, dk, dkappa, dw;
  std::vector<A> final_state, states, dbeta, dg, dinitial_state;

  explicit ScanData(const ScanCase& scan_case) : c(scan_case) {
    const int64_t tokens = c.B * c.T * c.H, M = c.L - 1 + c.own_first_key;
    q = normal(tokens * c.K, 1, 1 / std::sqrt(static_cast<double>(c.K)));
    k = normal(tokens * c.K, 2, 1), kappa = normal(tokens * M * c.K, 3, 1);
    unit_rows(k), unit_rows(kappa);
    w = normal(tokens * c.L * c.V, 4, 1), d_o = normal(tokens * c.V, 5, 1);
    if (c.states) {
      initial_state = converted<A>(normal(c.B * c.H * c.V * c.K, 6, 1));
      dfinal_state = converted<A>(normal(c.B * c.H * c.V * c.K, 7, 1));
    }
    for (int64_t i = 0; i < tokens; ++i) {
      if (c.erase) beta.push_back(static_cast<A>(draw_beta(i)));
      if (c.decay != ScanDecay::none) g.push_back(static_cast<A>(draw_g(i)));
    }
    if (c.documents) draw_documents();
    poison();
  }

  // The same inputs, rounded as `other` holds them.
  template <class U>
  explicit ScanData(const ScanData<U>& other)
      : c(other.c),
        segment(other.segment),
        start(other.start),
        q(converted<T>(other.q)),
        k(converted<T>(other.k)),
        kappa(converted<T>(other.kappa)),
        w(converted<T>(other.w)),
        d_o(converted<T>(other.d_o)),
        beta(converted<A>(other.beta)),
        g(converted<A>(other.g)),
        initial_state(converted<A>(other.initial_state)),
        dfinal_state(converted<A>(other.dfinal_state)) {
    poison();
  }

  void poison() {
    const auto like = [](auto& out, size_t size) {
      using X = typename std::decay_t<decltype(out)>::value_type;
      out.assign(size, X(std::numeric_limits<float>::quiet_NaN()));
    };
    const size_t state = static_cast<size_t>(c.B * c.H * c.V * c.K);
    like(o, d_o.size()), like(final_state, state), like(states, state * ((c.T + c.C - 1) / c.C));
    like(dq, q.size()), like(dk, k.size()), like(dkappa, kappa.size()), like(dw, w.size());
    like(dbeta, beta.size()), like(dg, g.size()), like(dinitial_state, state);
  }

  ScanArgs<T> args() {
    ScanArgs<T> a;
    a.o = o.data(), a.final_state = final_state.data();
    a.q = q.data(), a.k = k.data(), a.kappa = or_null(kappa), a.w = w.data();
    a.beta = or_null(beta), a.g = or_null(g), a.initial_state = or_null(initial_state);
    a.start = or_null(start), a.states = states.data();
    a.B = c.B, a.T_len = c.T, a.H = c.H, a.K = c.K, a.V = c.V, a.L = c.L;
    a.C = c.C, a.own_first_key = c.own_first_key;
    return a;
  }
  ScanGrads<T> grads() {
    ScanGrads<T> d;
    d.dq = dq.data(), d.dk = dk.data(), d.dkappa = or_null(dkappa), d.dw = dw.data();
    d.dbeta = or_null(dbeta), d.dg = or_null(dg), d.dinitial_state = dinitial_state.data();
    d.d_o = d_o.data(), d.dfinal_state = or_null(dfinal_state);
    return d;
  }

  // Calls fn(name, mine, theirs) for every output and gradient.
  template <class U, class Fn>
  void compare(ScanData<U>& other, const Fn& fn) {
    fn("o", o, other.o), fn("final_state", final_state, other.final_state);
    fn("dq", dq, other.dq), fn("dk", dk, other.dk), fn("dkappa", dkappa, other.dkappa);
    fn("dw", dw, other.dw), fn("dbeta", dbeta, other.dbeta), fn("dg", dg, other.dg);
    fn("dinitial_state", dinitial_state, other.dinitial_state);
  }

 private:
  template <class X>
  static auto or_null(std::vector<X>& v) {
    return v.empty() ? nullptr : v.data();
  }
  std::vector<T> normal(int64_t n, uint64_t stream, double scale) const {
    std::vector<double> x(static_cast<size_t>(n));
    for (size_t i = 0; i < x.size(); ++i) x[i] = scale * random_normal(c.seed, stream, i);
    return converted<T>(x);
  }
  void unit_rows(std::vector<T>& rows) const {
    std::vector<double> x = converted<double>(rows);
    for (size_t r = 0; r < x.size(); r += static_cast<size_t>(c.K)) {
      double sum = 0;
      for (int64_t i = 0; i < c.K; ++i) sum += x[r + i] * x[r + i];
      for (int64_t i = 0; i < c.K; ++i) x[r + i] /= std::sqrt(sum);
    }
    rows = converted<T>(x);
  }
  // In (0, 1), with the two ends themselves among them.
  double draw_beta(uint64_t i) const {
    const uint64_t end = random_below(8, c.seed, 8, i);
    return end < 2 ? static_cast<double>(end) : random_uniform(c.seed, 9, i);
  }
  double draw_g(uint64_t i) const {
    constexpr double hard[] = {0, -80, -1e4, -std::numeric_limits<double>::infinity()};
    const uint64_t pick = c.decay == ScanDecay::mixed ? random_below(16, c.seed, 10, i) : 16;
    return pick < 4 ? hard[pick] : -0.5 * random_uniform(c.seed, 11, i);
  }
  // Ids 0 and 1 in turns of random length: the same id comes back as a new document.
  void draw_documents() {
    segment.resize(static_cast<size_t>(c.B * c.T)), start.resize(segment.size());
    for (size_t i = 0; i < segment.size(); ++i)
      segment[i] = i == 0 ? 0 : segment[i - 1] ^ (random_below(7, c.seed, 12, i) == 0 ? 1 : 0);
    document_starts(start.data(), segment.data(), c.B, c.T);
  }
};

// A problem in a device's memory: run() fills the outputs of `data` from there.
template <class T>
class DeviceScan {
 public:
  DeviceScan(Device device, ScanData<T>& data) : device_(device), args_(data.args()), grads_(data.grads()) {
    in(args_.q, data.q), in(args_.k, data.k), in(args_.kappa, data.kappa), in(args_.w, data.w);
    in(args_.beta, data.beta), in(args_.g, data.g), in(args_.initial_state, data.initial_state);
    in(args_.start, data.start), in(grads_.d_o, data.d_o), in(grads_.dfinal_state, data.dfinal_state);
    out(args_.o, data.o), out(args_.final_state, data.final_state), out(args_.states, data.states);
    out(grads_.dq, data.dq), out(grads_.dk, data.dk), out(grads_.dkappa, data.dkappa);
    out(grads_.dw, data.dw), out(grads_.dbeta, data.dbeta), out(grads_.dg, data.dg);
    out(grads_.dinitial_state, data.dinitial_state);
  }

  void run() {
    for (const bool backward : {false, true}) {
      const Buffer workspace(device_, scan_workspace_bytes(device_, args_, backward));
      fill_bytes(device_, workspace.data(), 0xff, workspace.bytes());  // NaN
      ScanArgs<T> args = args_;
      args.workspace = workspace.data();
      if (backward)
        args.o = nullptr, args.final_state = nullptr;  // the forward pass has written them
      else
        args.states = nullptr;
      backward ? scan_backward(device_, args, grads_) : scan_forward(device_, args);
    }
    for (const Output& o : outputs_) copy_out(device_, o.host, o.memory, o.bytes);
  }

 private:
  struct Output {
    void* host;
    const void* memory;
    size_t bytes;
  };
  template <class P, class X>
  void in(P*& pointer, std::vector<X>& host) {
    pointer = nullptr;
    if (host.empty()) return;
    buffers_.emplace_back(device_, host.size() * sizeof(X));
    copy_in(device_, buffers_.back().data(), host.data(), buffers_.back().bytes());
    pointer = reinterpret_cast<P*>(buffers_.back().data());
  }
  template <class P, class X>
  void out(P*& pointer, std::vector<X>& host) {
    in(pointer, host);
    if (pointer) outputs_.push_back({host.data(), pointer, host.size() * sizeof(X)});
  }

  Device device_;
  ScanArgs<T> args_;
  ScanGrads<T> grads_;
  std::vector<Buffer> buffers_;
  std::vector<Output> outputs_;
};

// Every setting of the operator.
inline std::vector<ScanCase> scan_settings() {
  std::vector<ScanCase> cases;
  for (int64_t L : {1, 2, 3, 4})
    for (int own : {0, 1})
      for (bool erase : {true, false})
        for (ScanDecay decay : {ScanDecay::none, ScanDecay::mild, ScanDecay::mixed})
          for (bool documents : {false, true}) {
            ScanCase c;
            c.L = L, c.own_first_key = own, c.erase = erase, c.decay = decay, c.documents = documents;
            c.states = cases.size() % 3 != 2, c.seed = cases.size() + 1;
            cases.push_back(c);
          }
  return cases;
}

}  // namespace prism
