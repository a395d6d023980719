// inspect, report: what a model consists of, what its writes do, how runs went.
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "src/commands.h"
#include "src/inspect.h"
#include "src/model_files.h"
#include "src/page.h"
#include "src/progress.h"
#include "src/report.h"
#include "src/sources.h"

namespace prism {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string model, json, html;
  std::vector<std::string> data;
  InspectOptions what;
};

void show_parameters(const Model& model) {
  std::printf("%s\n%-60s %-18s %12s\n", to_json(model.config()).c_str(), "parameter", "shape", "count");
  int64_t block = 0, solver = 0;
  for (const Parameter& p : model.parameters().list()) {
    const int64_t n = p.shape.numel();
    std::printf("%-60s %-18s %12lld\n", p.name.c_str(), cat(p.shape).c_str(), static_cast<long long>(n));
    if (p.name.starts_with("model.layers.")) block += n;
    if (p.name.find(".solver.") != std::string::npos) solver += n;
  }
  std::printf("%-79s %12lld\n", "in all", static_cast<long long>(model.parameters().count()));
  std::printf("%-79s %12lld\n", "in the layers", static_cast<long long>(block));
  if (solver > 0)
    std::printf("%-79s %12lld  %.1f %% of the layers without it\n", "of them the solver's",
                static_cast<long long>(solver),
                100.0 * static_cast<double>(solver) / static_cast<double>(block - solver));
}

// Columns of 9 characters: numbers, "-" for null, text as it is.
void print_row(std::initializer_list<Json> cells) {
  for (const Json& cell : cells)
    if (cell.is_string() || cell.is_null())
      std::printf("%9s", cell.is_null() ? "-" : cell.get_ref<const std::string&>().c_str());
    else
      std::printf(cell.is_number_integer() ? "%9.0f" : "%9.4f", cell.get<double>());
  std::printf("\n");
}

Json mean_of(const Json& histogram) { return histogram.is_null() ? Json() : histogram["mean"]; }

void print_layers(const Json& seen) {
  print_row({"layer", "write", "|w|", "gate", "gain", "left", "cos k", "|cos k|", "rank", "decay", "returned",
             "|S| end", "anchor", "fitted"});
  for (const Json& layer : seen["layers"])
    for (const Json& write : layer["writes"]) {
      const size_t l = write["write"].get<size_t>() - 1;
      print_row({l ? "" : layer["layer"], write["write"], write["norm"], mean_of(write["gate"]),
                 mean_of(write["gain"]), write["left"], layer["cosine"][l][0], layer["overlap"][l][0],
                 l ? "" : layer["effective_rank"], l ? "" : mean_of(layer["decay"]),
                 l ? "" : layer["returned"], l ? "" : layer["state"]["norm"].back(),
                 l ? "" : layer["anchor"]["own"], l ? "" : layer["anchor"]["fitted"]});
    }
}

void print_token(const Json& token) {
  std::printf("\nposition %s, id %s, after %s: %s\n", token["position"].dump().c_str(),
              token["id"].dump().c_str(), shown(token["before"]).c_str(), shown(token["text"]).c_str());
  print_row({"layer", "head", "decay", "erase", "|v|", "|S k|", "|S| bef.", "|S| after", "returned", "rank",
             "write", "|r|", "gain", "left", "gate", "|w|", "cos k"});
  for (const Json& layer : token["layers"])
    for (const Json& head : layer["heads"])
      for (const Json& write : head["writes"]) {
        const bool more = write["write"] != 1;
        const auto once = [&](const Json& value) { return more ? Json("") : value; };
        print_row({once(layer["layer"]), once(head["head"]), once(head["decay"]), once(head["erase"]),
                   once(head["v"]), once(head["recalled"]), once(head["state_before"]),
                   once(head["state_after"]), once(head["returned"]), once(head["effective_rank"]),
                   write["write"], write["residual"], write["gain"], write["left"], write["gate"],
                   write["norm"], write["cosine_k"]});
      }
}

void inspect(const Options& o) {
  if (o.data.empty() && (!o.json.empty() || !o.html.empty() || o.what.token >= 0))
    throw UsageError("inspect: expected --data with --json, --html and --token");
  const std::unique_ptr<Model> model = load_model(o.model, Device::cpu, DType::f32, false);
  if (o.data.empty()) return show_parameters(*model);
  const Json seen = inspect_data(*model, o.model, o.data, o.what);
  std::printf("%s x %s positions; means over positions and heads\n", seen["rows"].dump().c_str(),
              seen["seq"].dump().c_str());
  print_layers(seen);
  if (seen.contains("token")) print_token(seen["token"]);
  if (!o.json.empty())
    replace_file(o.json, [&](OutputFile& file) {
      file.write(seen.dump(1, ' ', true, Json::error_handler_t::replace) + "\n");
    });
  if (!o.html.empty()) write_page(o.html, {{"name", o.model}, {"inspect", seen}});
}

// --- report

struct RunsOptions {
  std::vector<std::string> runs;
  std::string out;
  ReportOptions what;
};

void report(const RunsOptions& o) {
  Json page = {{"runs", Json::array()}};
  Progress progress;
  for (std::string dir : o.runs) {
    while (dir.size() > 1 && dir.ends_with('/')) dir.pop_back();
    progress.show(dir);
    const Json run = describe_run(dir, o.what);
    for (const Json& note : run["notes"]) progress.keep(dir + ": " + note.get<std::string>());
    page["runs"].push_back(run);
  }
  write_page(o.out, page);
  progress.keep(cat(o.out, ": ", o.runs.size(), o.runs.size() == 1 ? " run" : " runs"));
}

}  // namespace

void add_report(CLI::App& app) {
  const auto o = std::make_shared<RunsOptions>();
  CLI::App* command =
      app.add_subcommand("report", "Lay runs side by side in one HTML file that needs nothing else");
  command->add_option("runs", o->runs, "directories of prism train")->required();
  command->add_option("--out", o->out, "HTML file to write")->required();
  command->add_option(
      "--inspect", o->what.inspect,
      "data to look at each model's writes on, as inspect does; else a run's own inspect.json is shown");
  command->add_option("--tokens", o->what.tokens, "length of each model's sample; 0: none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--prompt", o->what.prompt, "what the samples go on from");
  command->footer(
      "A run's eval*.json (prism eval --json) and inspect.json (prism inspect --json) are shown when they "
      "lie in it.\n"
      "Example: prism report runs/first runs/second --out report.html --inspect README.md");
  command->callback([o] { report(*o); });
}

void add_inspect(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "inspect", "Show a model's configuration and parameters; with --data, what each of its writes does");
  command->add_option("--model", o->model, "checkpoint directory")->required();
  command->add_option("--data", o->data, "text files, directories, token shards (.bin), data sets");
  command->add_option("--rows", o->what.rows, "windows of the data to look at")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--seq", o->what.seq, "positions of a window")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--token", o->what.token, "walk through this position, counted from 0, number by number")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--json", o->json, "file for all the numbers, histograms and curves with them");
  command->add_option("--html", o->html, "file for a page that draws them");
  command->footer(
      "The columns are means over positions and heads: |w| norm of the write value; gate beta_l; gain the "
      "share\n"
      "of each entry of the residual that the step takes; left the residual's norm after the step over that "
      "of\n"
      "the first one; cos k the cosine of kappa_l and k, and its size; rank the effective rank of a token's\n"
      "write (exp of the entropy of its singular values); decay alpha; returned the cosine of S_t k_t and "
      "v_t;\n"
      "|S| end the state's norm at the end of the windows; anchor the correlation of the model's projection "
      "of u\n"
      "with S_{t-1} k_t; fitted that of the best linear map of u, on positions it was not fitted on.\n"
      "Example: prism inspect --model runs/first --data README.md --html writes.html");
  command->callback([o] { inspect(*o); });
}

}  // namespace prism
