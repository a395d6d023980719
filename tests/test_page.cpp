// report and the pages: what is embedded comes back as it was, nothing in it becomes markup, odd runs are
// told.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "src/files.h"
#include "src/model_files.h"
#include "src/page.h"
#include "src/report.h"
#include "tests/scratch.h"

using namespace prism;
using Json = nlohmann::ordered_json;

namespace {

int64_t count(const std::string& text, const std::string& part) {
  int64_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != text.npos; ++at) ++n;
  return n;
}

std::string page_of(const Scratch& dir, const Json& data) {
  write_page(dir / "page.html", data);
  return read_text(dir / "page.html", 1 << 24);
}

constexpr const char* kLine = R"({"step": 10, "loss": 2.123456789, "lr": 0.001, "grad_norm": null}
{"step": 20, "loss": 2, "lr": 0.001, "grad_norm": 1.5, "tokens_per_second": 1000, "val_loss": 2.5}
)";

}  // namespace

TEST_CASE("a page holds any string as data, and none as markup") {
  const Scratch dir;
  const Json data = {{"name", "</script><img src=x onerror=alert(1)><!-- \" & ' \u2028 @DATA@"},
                     {"runs", Json::array()}};
  const std::string page = page_of(dir, data), plain = page_of(dir, {{"runs", Json::array()}});
  for (const char* tag : {"<script", "</script", "<img", "<!--", "</html>"})
    CHECK(count(page, tag) == count(plain, tag));
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const size_t begin = page.find(open) + open.size();
  CHECK(Json::parse(page.substr(begin, page.find("</script", begin) - begin)) == data);
  // Bytes that are no UTF-8 are replaced, not an end of the program.
  CHECK(page_of(dir, {{"name", "\xff"}}).find("\\ufffd") != std::string::npos);
}

TEST_CASE("a page is whole and needs no network") {
  const Scratch dir;
  const std::string page = page_of(dir, {{"runs", Json::array()}});
  CHECK(page.starts_with("<!doctype html>"));
  CHECK(page.ends_with("</html>\n"));
  for (const char* tag : {"style", "script", "title", "html"})
    CHECK(count(page, cat("<", tag, ">")) + count(page, cat("<", tag, " ")) ==
          count(page, cat("</", tag, ">")));
  CHECK(count(page, "http") == 2);  // http-equiv, and the name of SVG's namespace
  for (const char* way : {"fetch(", "XMLHttp", "import(", "innerHTML", "url(", "@import"})
    CHECK(count(page, way) == 0);
}

TEST_CASE("report: two runs side by side, from their logs, models, tables and samples") {
  const Scratch dir;
  ReportOptions o;
  o.tokens = 4, o.prompt = "a<b";
  Config config = find_preset("tiny").config;
  config.num_hidden_layers = 1;
  for (const int64_t rank : {1, 3}) {
    config.rank = rank;
    const std::string run = cat("rank", rank);
    Model model(config, Device::cpu, DType::f32, false);
    model.parameters().initialise(1);
    save_model(dir / run, model, Tokenizer());
    dir.write(run + "/log.jsonl", std::string(kLine) + "{\"step\": 30, \"lo");  // as a kill leaves it
    dir.write(run + "/eval-a.json", R"({"results": [{"task": "ppl", "file": "/x/a.txt", "loss": 1.5}]})");
    dir.write(run + "/eval-b.json", "[]");
    if (rank == 3)
      dir.write(run + "/trainer_state.json",
                R"({"settings": {"batch": 8, "seq": 64, "accumulate": 2, "data": ["a"]}})");
  }
  o.inspect = {dir.write("text.txt", std::string(300, 'a') + "bcd")};
  for (const int64_t rank : {1, 3}) {
    const Json run = describe_run(dir / cat("rank", rank), o);
    CHECK(run["log"]["step"] == Json({10, 20}));
    CHECK(run["log"]["loss"] == Json({2.12346, 2}));
    CHECK(run["log"]["val_loss"] == Json({nullptr, 2.5}));
    CHECK(run["log"]["grad_norm"] == Json({nullptr, 1.5}));
    CHECK(run["evaluation"] == Json({{"ppl a.txt loss", 1.5}}));
    CHECK(run["settings"]["rank"] == rank);
    CHECK(run["inspect"]["layers"][0]["writes"].size() == static_cast<size_t>(rank));
    CHECK(run["sample"]["prompt"] == "a<b");
    Json notes = {"log.jsonl: 1 of 3 lines left out: cut short, or not an object with a step",
                  "eval-b.json: expected a table as of prism eval --json; left out"};
    if (rank == 3) {
      CHECK(run["tokens_per_step"] == 1024);
      CHECK(run["settings"]["--data"] == "[\"a\"]");
    } else {
      notes.push_back("no trainer_state.json that says its batch: its tokens and time are not known");
    }
    CHECK(run["notes"] == notes);
    CHECK(page_of(dir, {{"runs", Json::array({run})}}).find("a\\u003cb") != std::string::npos);
  }
}

TEST_CASE(
    "report: what is no run is one line that says so; a run without a checkpoint still has its curves") {
  const Scratch dir;
  const std::string file = dir.write("file", ""), run = dir / "run";
  CHECK_THROWS_WITH_AS(describe_run(file, {}),
                       (file + ": expected the directory of a run, got a file").c_str(), Error);
  CHECK_THROWS_WITH_AS(describe_run(run, {}),
                       (run + ": expected the directory of a run, got nothing there").c_str(), Error);
  dir.write("run/config.txt", "");
  CHECK_THROWS_WITH_AS(describe_run(run, {}), (run + ": expected a run's log.jsonl in it, got none").c_str(),
                       Error);
  dir.write("run/log.jsonl", "nonsense\n");
  CHECK_THROWS_WITH_AS(describe_run(run, {}),
                       (run + "/log.jsonl: expected lines with a step, got none").c_str(), Error);
  dir.write("run/log.jsonl", kLine);
  const Json described = describe_run(run, {});
  CHECK(described["log"]["step"].size() == 2);
  CHECK(described["notes"] == Json({"no checkpoint: its model, tokens and time are not known"}));
}
