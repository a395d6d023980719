#include "src/inspect.h"

#include <Eigen/Dense>
#include <cmath>
#include <nlohmann/json.hpp>

#include "kernels/eigen.h"
#include "src/host.h"
#include "src/model_files.h"
#include "src/progress.h"
#include "src/sources.h"

namespace prism {

namespace {

using Json = nlohmann::ordered_json;
using Numbers = Matrix<double>;  // a position a row
using Vector = Eigen::VectorXd;

constexpr int kBars = 20;          // of a histogram
constexpr int64_t kAges = 64;      // points of the curve of the state's norm
constexpr double kRidge = 1e-3;    // of the mean square of u's channels, in the fit of the anchor
constexpr double kCertain = 1e3;   // sigmoid of it is 1
constexpr double kNoValue = 1e-9;  // numbers smaller than this have no ratio

Numbers on_host(const Columns& x) {
  if (!x) return {};
  const std::vector<double> all = to_host(x.of->value);
  const int64_t width = x.of->value.shape[-1];
  return matrix(Rows<const double>{all.data() + x.begin, width}, std::ssize(all) / width, x.width);
}

// null where there is no number: a mean of nothing, a ratio to 0.
Json number(double x) { return std::isfinite(x) ? Json(x) : Json(); }

double cosine(const Vector& a, const Vector& b) {
  const double norms = a.norm() * b.norm();
  return norms > 0 ? a.dot(b) / norms : 0;
}

class Mean {
 public:
  void add(double x) { sum_ += x, ++count_; }
  double get() const { return sum_ / static_cast<double>(count_); }  // of nothing: NaN

 private:
  double sum_ = 0;
  int64_t count_ = 0;
};

// Counts in bars over [0, 1], or over what there is when a number lies outside; NaN is not counted.
Json histogram(const Numbers& x) {
  double low = 0, high = 1;
  Mean mean;
  for (double value : x.reshaped())
    if (!std::isnan(value)) low = std::min(low, value), high = std::max(high, value), mean.add(value);
  std::vector<int64_t> counts(kBars);
  for (double value : x.reshaped())
    if (!std::isnan(value))
      ++counts[static_cast<size_t>(std::min<double>(kBars - 1, (value - low) / (high - low) * kBars))];
  return {{"mean", number(mean.get())}, {"low", low}, {"high", high}, {"counts", counts}};
}

// Pearson's correlation of x and y, each channel (column) around its own mean, all channels in one sum.
double correlation(const Numbers& x, const Numbers& y) {
  const Numbers a = x.rowwise() - x.colwise().mean(), b = y.rowwise() - y.colwise().mean();
  return a.cwiseProduct(b).sum() / (a.norm() * b.norm());
}

// The correlation of y with its best linear prediction from x (ridge regression), fitted on the first half of
// the rows and taken on the second.
double fitted_correlation(const Numbers& x, const Numbers& y) {
  const int64_t half = x.rows() / 2, D = x.cols();
  if (half < 2) return NAN;
  const Numbers a = x.topRows(half).rowwise() - x.topRows(half).colwise().mean();
  const Numbers b = y.topRows(half).rowwise() - y.topRows(half).colwise().mean();
  Eigen::MatrixXd square = a.transpose() * a;
  square.diagonal().array() += kRidge * square.trace() / static_cast<double>(D) + kNoValue;
  const Numbers map = square.ldlt().solve(a.transpose() * b);
  return correlation(x.bottomRows(half) * map, y.bottomRows(half));
}

// One mixer's values on the host, in double: those the pass had, and those derived here.
class Values {
 public:
  Values(const MixerValues& from, const Batch& batch);
  Json summary() const;
  Json walk(int64_t i) const;  // position i through the solver, head by head

 private:
  Vector w_of(int64_t i, int64_t l, int64_t h) const { return w.row(i).segment((l * H + h) * V, V); }
  Vector key_of(int64_t i, int64_t l, int64_t h) const {
    return l == 0 ? k.row(i).segment(h * K, K) : kappa.row(i).segment(((l - 1) * H + h) * K, K);
  }
  double alpha(int64_t i, int64_t h) const { return g.size() ? std::exp(g(i, h)) : 1; }
  double erases(int64_t i, int64_t h) const { return erase.size() ? erase(i, h) : 0; }
  // The step that makes write l, counted from 0, or -1: the write is v itself.
  int64_t step_of(int64_t l) const { return loop ? l : l - 1; }
  void take_steps(const SolverInputs& s);
  void recur();
  double effective_rank(int64_t i, int64_t h) const;
  Json write(int64_t l) const;
  Json anchors() const;
  Json state_by_age() const;

  const Batch& batch;
  int64_t n, H, K, V, L;
  bool loop;
  Numbers u, anchor, v, k, kappa, w, g, erase;  // as in MixerValues; empty where absent
  Numbers gates;                                // [n, L H] beta_l, the confidence of write l
  Numbers gain;      // [n, steps H V] delta_l / r_l: the share of what was left that a step takes
  Numbers residual;  // [n, (steps + 1) H] ||r||: before the first step, then after each
  Numbers recalled;  // [n, H V] S_{t-1} k_t
  Numbers returned;  // [n, H] cosine of S_t k_t, what the state answers after the write, and v_t
  Numbers norm;      // [n, H] ||S_t||, Frobenius
};

Values::Values(const MixerValues& from, const Batch& b)
    : batch(b), n(b.B * b.T), H(from.scan.H), K(from.scan.K), V(from.scan.V), L(from.scan.L) {
  const SolverInputs& s = from.solver;
  loop = s.first_is_step;
  u = on_host(from.u), anchor = on_host(s.anchor), v = on_host(s.v), w = on_host(from.scan.w);
  k = on_host(from.scan.k), kappa = on_host(from.scan.kappa);
  g = on_host(from.scan.g), erase = on_host(from.scan.beta);
  gates.resize(n, L * H);
  gates.leftCols(H) = on_host(s.beta);
  if (L > 1) {
    Numbers logits = on_host(s.gate);
    if (s.gate_bias) logits.rowwise() += array(to_host(s.gate_bias->value).data(), (L - 1) * H).matrix();
    gates.rightCols((L - 1) * H) = sigmoid(logits.array());
  }
  take_steps(s);
  recur();
}

// The engine's solver with every confidence at 1 writes the corrections delta_l themselves.
void Values::take_steps(const SolverInputs& s) {
  const Numbers y = on_host(s.y), ones = Numbers::Ones(n, H);
  const Numbers certain = Numbers::Constant(1, L * H, kCertain);
  Numbers delta(n, L * H * V);
  SolverArgs<double> a;
  a.w = delta.data(), a.v = {v.data(), H * V}, a.beta = ones.data(), a.gate = {certain.data(), 0};
  if (y.size()) a.y = {y.data(), y.cols()};
  if (anchor.size()) a.anchor = {anchor.data(), H * V};
  a.n = n, a.L = L, a.H = H, a.V = V, a.gain = s.gain, a.first_is_step = loop, a.retain = s.retain;
  cpu::solver_forward(a);

  const int64_t steps = a.steps(), HV = H * V;
  gain.resize(n, steps * HV), residual.resize(n, (steps + 1) * H);
  Numbers r = v;
  if (anchor.size()) r -= anchor;
  const auto measure = [&](int64_t step) {
    for (int64_t h = 0; h < H; ++h) residual.col(step * H + h) = r.middleCols(h * V, V).rowwise().norm();
  };
  measure(0);
  for (int64_t step = 0; step < steps; ++step) {
    const Numbers correction = delta.middleCols((loop ? step : step + 1) * HV, HV);
    gain.middleCols(step * HV, HV) =
        correction.binaryExpr(r, [](double d, double x) { return std::abs(x) < kNoValue ? NAN : d / x; });
    if (s.retain) r -= correction;
    measure(step + 1);
  }
}

// SPEC section 1, S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + sum_l w_l kappa_l^T, to look at every S_t.
void Values::recur() {
  recalled.resize(n, H * V), returned.resize(n, H), norm.resize(n, H);
  parallel_for(batch.B * H, [&](int64_t row) {
    const int64_t h = row % H;
    Numbers S(V, K);
    for (int64_t t = 0; t < batch.T; ++t) {
      const int64_t i = row / H * batch.T + t;
      if (batch.start[static_cast<size_t>(i)] == t) S.setZero();
      const Vector key = key_of(i, 0, h), found = S * key;
      recalled.row(i).segment(h * V, V) = found;
      S = alpha(i, h) * (S - erases(i, h) * found * key.transpose());
      for (int64_t l = 0; l < L; ++l) S += w_of(i, l, h) * key_of(i, l, h).transpose();
      returned(i, h) = cosine(S * key, v.row(i).segment(h * V, V));
      norm(i, h) = S.norm();
    }
  });
}

// exp of the entropy of the singular values' shares, for one token's write sum_l w_l kappa_l^T: 1 when the L
// writes lie on one line, L when they are orthogonal and equally large (Roy and Vetterli 2007).
double Values::effective_rank(int64_t i, int64_t h) const {
  Eigen::MatrixXd values(V, L), keys(K, L);
  for (int64_t l = 0; l < L; ++l) values.col(l) = w_of(i, l, h), keys.col(l) = key_of(i, l, h);
  // W Kappa^T = Q_w R_w R_k^T Q_k^T has the singular values of the small R_w R_k^T.
  const auto triangle = [&](const Eigen::MatrixXd& x) -> Eigen::MatrixXd {
    return x.householderQr().matrixQR().topRows(std::min(x.rows(), L)).triangularView<Eigen::Upper>();
  };
  const Vector sigma =
      Eigen::JacobiSVD<Eigen::MatrixXd>(triangle(values) * triangle(keys).transpose()).singularValues();
  if (sigma.sum() == 0) return NAN;
  const Eigen::ArrayXd share = sigma.array() / sigma.sum();
  return std::exp(-(share > 0).select(share * share.log(), 0).sum());
}

Json Values::write(int64_t l) const {
  Mean length;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t h = 0; h < H; ++h) length.add(w_of(i, l, h).norm());
  const int64_t step = step_of(l);
  Json out = {
      {"write", l + 1}, {"norm", number(length.get())}, {"gate", histogram(gates.middleCols(l * H, H))}};
  // What a step takes, and what it leaves: the mean norm of r_{l+1} over that of the first residual.
  out["gain"] = step < 0 ? Json() : histogram(gain.middleCols(step * H * V, H * V));
  out["left"] =
      step < 0 ? Json() : number(residual.middleCols((step + 1) * H, H).sum() / residual.leftCols(H).sum());
  return out;
}

// How well u foretells S_{t-1} k_t, which Eq. 14 lets it stand for; tokens that open a document recall
// nothing. "own": the model's own projection of u, where it has one. "fitted": the best there is.
Json Values::anchors() const {
  std::vector<int64_t> inside;
  for (int64_t i = 0; i < n; ++i)
    if (batch.start[static_cast<size_t>(i)] != i % batch.T) inside.push_back(i);
  const Numbers target = recalled(inside, Eigen::all);
  Json out;
  out["own"] = anchor.size() ? number(correlation(anchor(inside, Eigen::all), target)) : Json();
  out["fitted"] = u.size() ? number(fitted_correlation(u(inside, Eigen::all), target)) : Json();
  return out;
}

// The mean norm of S_t by the number of tokens since the state was empty.
Json Values::state_by_age() const {
  const int64_t width = (batch.T + kAges - 1) / kAges;
  std::vector<Mean> means(static_cast<size_t>((batch.T + width - 1) / width));
  for (int64_t i = 0; i < n; ++i)
    means[static_cast<size_t>((i % batch.T - batch.start[static_cast<size_t>(i)]) / width)].add(
        norm.row(i).mean());
  Json out = {{"age", Json::array()}, {"norm", Json::array()}};
  for (size_t a = 0; a < means.size(); ++a)
    if (const double x = means[a].get(); !std::isnan(x))
      out["age"].push_back(static_cast<int64_t>(a + 1) * width), out["norm"].push_back(x);
  return out;
}

Json Values::summary() const {
  Json writes = Json::array(), cosines = Json::array(), overlaps = Json::array();
  Mean rank;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t h = 0; h < H; ++h)
      if (const double r = effective_rank(i, h); !std::isnan(r)) rank.add(r);
  for (int64_t l = 0; l < L; ++l) {
    writes.push_back(write(l));
    // Between kappa_l and kappa_m, kappa_1 being k: mean cosine, and mean of its size.
    std::vector<double> signed_row, sizes;
    for (int64_t m = 0; m < L; ++m) {
      Mean mean, size;
      for (int64_t i = 0; i < n; ++i)
        for (int64_t h = 0; h < H; ++h) {
          const double c = cosine(key_of(i, l, h), key_of(i, m, h));
          mean.add(c), size.add(std::abs(c));
        }
      signed_row.push_back(mean.get()), sizes.push_back(size.get());
    }
    cosines.push_back(signed_row), overlaps.push_back(sizes);
  }
  return {{"writes", writes},
          {"cosine", cosines},
          {"overlap", overlaps},
          {"effective_rank", number(rank.get())},
          {"decay", g.size() ? histogram(g.array().exp()) : Json()},
          {"returned", number(returned.mean())},
          {"state", state_by_age()},
          {"anchor", anchors()}};
}

Json Values::walk(int64_t i) const {
  Json heads = Json::array();
  for (int64_t h = 0; h < H; ++h) {
    Json writes = Json::array();
    for (int64_t l = 0; l < L; ++l) {
      const int64_t step = step_of(l);
      Json out = {{"write", l + 1}, {"residual", nullptr}, {"gain", nullptr}, {"left", nullptr}};
      if (step >= 0) {
        const auto p = gain.row(i).segment((step * H + h) * V, V).array();
        out["residual"] = residual(i, step * H + h);
        out["gain"] = p.isNaN().select(0, p).mean();
        out["left"] = number(residual(i, (step + 1) * H + h) / residual(i, h));
      }
      out["gate"] = gates(i, l * H + h), out["norm"] = w_of(i, l, h).norm();
      out["cosine_k"] = cosine(key_of(i, l, h), key_of(i, 0, h));
      writes.push_back(out);
    }
    const bool opens = batch.start[static_cast<size_t>(i)] == i % batch.T;
    heads.push_back({{"head", h},
                     {"decay", alpha(i, h)},
                     {"erase", erases(i, h)},
                     {"v", v.row(i).segment(h * V, V).norm()},
                     {"recalled", recalled.row(i).segment(h * V, V).norm()},
                     {"state_before", opens ? 0 : norm(i - 1, h)},
                     {"state_after", norm(i, h)},
                     {"returned", returned(i, h)},
                     {"effective_rank", number(effective_rank(i, h))},
                     {"writes", writes}});
  }
  return heads;
}

// The data's first windows, all positions of them real.
Batch first_windows(const TokenStream& stream, const Config& config, int32_t bos, const InspectOptions& o) {
  PRISM_CHECK(stream.size() > 1, "inspect: expected at least 2 ids, got ", stream.size());
  LoaderOptions how;
  how.T = std::min(o.seq, stream.size() - 1), how.B = std::min(o.rows, (stream.size() - 1) / how.T);
  how.vocab = config.vocab_size, how.bos = bos, how.shuffle = false;
  return Loader({{stream, 1}}, how).next();
}

Json describe_token(const Batch& batch, int64_t i, const Tokenizer* tokenizer) {
  const auto text = [&](int64_t begin, int64_t end) {
    return tokenizer ? tokenizer->decode({batch.tokens.begin() + begin, batch.tokens.begin() + end}) : "";
  };
  const int64_t row = i / batch.T * batch.T;
  return {{"position", i},
          {"id", batch.tokens[static_cast<size_t>(i)]},
          {"before", text(std::max(row, i - 20), i)},
          {"text", text(i, i + 1)},
          {"layers", Json::array()}};
}

}  // namespace

Json inspect_writes(Model& model, const TokenStream& stream, const Tokenizer* tokenizer,
                    const InspectOptions& o) {
  const Config& config = model.config();
  const int32_t bos = static_cast<int32_t>(tokenizer ? tokenizer->bos() : config.bos_token_id);
  const Batch batch = first_windows(stream, config, bos, o);
  PRISM_CHECK(o.token < batch.B * batch.T, "--token: expected a position below ", batch.B * batch.T,
              " (rows x seq), got ", o.token);
  Json out = {{"rows", batch.B}, {"seq", batch.T}, {"rank", config.rank}, {"layers", Json::array()}};
  if (o.token >= 0) out["token"] = describe_token(batch, o.token, tokenizer);
  Progress progress;
  model.watch = [&](int64_t layer, const MixerValues& values) {
    progress.show(cat("layer ", layer + 1, " of ", config.num_hidden_layers));
    const Values seen(values, batch);
    Json object = {{"layer", layer}, {"mixer", config.mixer(layer)}};
    object.update(seen.summary());
    out["layers"].push_back(object);
    if (o.token >= 0) out["token"]["layers"].push_back({{"layer", layer}, {"heads", seen.walk(o.token)}});
  };
  Engine(model, batch.B, batch.T).evaluate(batch);
  model.watch = nullptr;
  return out;
}

Json inspect_data(Model& model, const std::string& dir, const std::vector<std::string>& data,
                  const InspectOptions& o) {
  std::optional<Tokenizer> tokenizer;
  if (const std::string at = newest_checkpoint(dir); Tokenizer::lies_in(at)) tokenizer = Tokenizer::load(at);
  const TokenStream stream = open_sources(data, tokenizer, {.hold_out = false}).val;
  return inspect_writes(model, stream, tokenizer ? &*tokenizer : nullptr, o);
}

}  // namespace prism
