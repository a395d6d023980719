// eval and generate through the command line, against logits that other code computes.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>

#include "src/commands.h"
#include "src/decoder.h"
#include "src/model_files.h"
#include "src/safetensors.h"
#include "tensor/rng.h"
#include "tests/data_helpers.h"
#include "tests/scratch.h"

using namespace prism;
using Args = std::vector<std::string>;
using nlohmann::json;

namespace {

// Runs a command line, `input` on its standard input; returns its standard output. Its exceptions pass.
std::string run(const Scratch& dir, Args words, const std::string& input = "") {
  CLI::App app;
  add_train(app), add_eval(app), add_generate(app), add_grad(app), add_init(app);
  std::fflush(stdout);
  const std::string from = dir.write("stdin", input), to = dir / "stdout";
  const int saved[2] = {::dup(0), ::dup(1)};
  const int files[2] = {::open(from.c_str(), O_RDONLY), ::open(to.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600)};
  for (int i : {0, 1}) ::dup2(files[i], i), ::close(files[i]);
  std::cin.clear();
  const auto restore = [&] {
    std::fflush(stdout);
    for (int i : {0, 1}) ::dup2(saved[i], i), ::close(saved[i]);
  };
  std::reverse(words.begin(), words.end());  // as CLI11 wants them
  try {
    app.parse(words);
  } catch (...) {
    restore();
    throw;
  }
  restore();
  return read_file(to);
}

Args operator+(Args a, const Args& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// A model that has learned some words, and one that has not; bytes, 2 layers, rank 2.
struct Desk : Scratch {
  Desk() {
    write("config.json",
          R"({"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 8,
              "expand_v": 2, "intermediate_size": 24, "bos_token_id": 256, "eos_token_id": 257,
              "tie_word_embeddings": true, "mixers": "prism", "rank": 2, "solver_dim": 4})");
    std::string text;
    for (int i = 0; i < 200; ++i) text += "the cat sat on the mat. ";
    write("text.txt", text);
    run(*this, {"train",
                "--config",
                *this / "config.json",
                "--data",
                *this / "text.txt",
                "--out",
                *this / "trained",
                "--steps",
                "60",
                "--batch",
                "4",
                "--seq",
                "48",
                "--lr",
                "0.01",
                "--warmup",
                "3",
                "--seed",
                "1",
                "--device",
                "cpu",
                "--threads",
                "1"});
    run(*this, {"init", "--config", *this / "config.json", "--seed", "2", "--out", *this / "random"});
  }
  // The table's rows as JSON.
  json eval(const std::string& model, const Args& more) const {
    run(*this, Args{"eval", "--model", *this / model, "--device", "cpu", "--dtype", "f64", "--json",
                    *this / "table.json"} +
                   more);
    return json::parse(read_file(*this / "table.json"))["results"];
  }
  std::string generate(const std::string& model, const Args& more, const std::string& input = "") const {
    return run(*this, Args{"generate", "--model", *this / model, "--device", "cpu"} + more, input);
  }
};

double minus_log_softmax(std::span<const double> logits, int32_t id) {
  const double highest = *std::max_element(logits.begin(), logits.end());
  double total = 0;
  for (double x : logits) total += std::exp(x - highest);
  return std::log(total) + highest - logits[static_cast<size_t>(id)];
}

// What a model makes of `after` behind `before`, id by id.
struct Reading {
  double loss = 0;
  bool likeliest = true;
};
Reading read(Decoder& decoder, const std::string& before, const std::string& after) {
  Reading reading;
  decoder.reset();
  std::vector<int32_t> ids = {256};
  Tokenizer().encode(before, ids);
  std::vector<double> logits = decoder.feed(ids);
  for (int32_t id : Tokenizer().encode(after)) {
    reading.loss += minus_log_softmax(logits, id);
    reading.likeliest =
        reading.likeliest && std::max_element(logits.begin(), logits.end()) - logits.begin() == id;
    logits = decoder.feed({&id, 1});
  }
  return reading;
}

std::string random_word(uint64_t index, size_t size) {
  std::string word;
  for (size_t i = 0; i < size; ++i)
    word += static_cast<char>('a' + random_below(26, 5, index, static_cast<uint64_t>(i)));
  return word;
}

}  // namespace

TEST_CASE("eval ppl: every measure equals what `prism grad`'s logits give, for any form, batch and slice") {
  const Desk dir;
  const Args texts = {"the cat sat on the cat.\n", "caf\u00e9  \u4f60\u597d, the mat. " + random_word(1, 90),
                      "a cat\non a mat"};
  std::string lines;
  double words = 0, bytes = 0;
  for (const std::string& text : texts) {
    lines += json_line(text), bytes += static_cast<double>(text.size());
    std::istringstream in(text);
    for (std::string word; in >> word;) ++words;
  }
  std::vector<int32_t> ids = expected_ids(texts);
  const auto shard = [&](const std::string& name) {
    ShardWriter writer(dir / name, 2);
    writer.append(ids.data(), static_cast<int64_t>(ids.size()));
    writer.finish();
    return dir / name;
  };
  const std::string bin = shard("ids.bin");
  ids.push_back(256);  // grad wants one more id than positions
  const std::string n = std::to_string(ids.size() - 1);
  run(dir, {"grad", "--model", dir / "trained", "--tokens", shard("more.bin"), "--seq", n, "--separator",
            "256", "--dtype", "f64", "--device", "cpu", "--out", dir / "grad.safetensors"});
  std::vector<double> logits((ids.size() - 1) * 258);
  SafetensorsFile(dir / "grad.safetensors")
      .read("logits", {logits.data(), {1, std::stoll(n), 258}, DType::f64, Device::cpu});
  double loss = 0;
  for (size_t i = 0; i + 1 < ids.size(); ++i)
    if (ids[i + 1] != 256) loss += minus_log_softmax({logits.data() + i * 258, 258}, ids[i + 1]);
  const double scored = static_cast<double>(ids.size() - 1 - texts.size());

  const Args files = {dir.write("a.jsonl", lines), dir.write("a.jsonl.zst", compressed(lines)), bin};
  const Args shapes[] = {{}, {"--batch", "1", "--seq", "7"}, {"--batch", "2", "--seq", "1000"}};
  for (const Args& shape : shapes) {
    const json rows = dir.eval("trained", Args{"--data"} + files + shape);
    REQUIRE(rows.size() == 4);
    for (const json& row : rows) {
      CAPTURE(row.dump());
      const double times = row["file"] == "all" ? 3 : 1;
      CHECK(row["documents"] == 3 * times);
      CHECK(row["ids"] == scored * times);
      CHECK(row["loss"].get<double>() == doctest::Approx(loss / scored).epsilon(1e-12));
      CHECK(row["perplexity"].get<double>() == doctest::Approx(std::exp(loss / scored)).epsilon(1e-12));
      CHECK(row["word_perplexity"].get<double>() == doctest::Approx(std::exp(loss / words)).epsilon(1e-11));
      CHECK(row["bits_per_byte"].get<double>() ==
            doctest::Approx(loss / bytes / std::log(2.0)).epsilon(1e-12));
    }
  }
}

TEST_CASE("eval lambada and choice: the harness's measures, as reading id by id gives them") {
  const Desk dir;
  const std::unique_ptr<Model> model = load_model(dir / "trained", Device::cpu, DType::f64, false);
  Decoder decoder(*model);
  struct Word {
    std::string context, word;
  };
  std::string lines;
  double right = 0, loss = 0;
  const Word words[] = {{"the cat sat on the mat. the cat sat on the", "mat."},
                        {"the cat sat on the mat. the cat sat on the", "dog."},
                        {"the cat sat on the mat. the cat ", "sat"},
                        {"", "the"}};
  for (const auto& [context, word] : words) {
    lines += json({{"context", context}, {"continuation", word}}).dump() + "\n";
    // White space that ends the context is scored with the continuation.
    const Reading reading = read(decoder, context.substr(0, context.find_last_not_of(' ') + 1), " " + word);
    right += reading.likeliest, loss += reading.loss;
  }
  CHECK(right > 0);
  CHECK(right < 4);
  const std::string lambada = dir.write("words.jsonl", lines);

  // The shortest choice is the likeliest in all, a longer one by its bytes; then the forms of the other
  // files.
  const Args choices = {"zq", "the cat sat on the mat. ", "the q\u00e9"};
  lines = json({{"query", "Question: who?\n"}, {"choices", choices}, {"gold", 1}}).dump() + "\n" +
          json({{"query", "the cat sat on"}, {"choices", choices}, {"gold", 1}}).dump() + "\n" +
          json({{"context_options", {"the dog sat on", "the cat sat on"}},
                {"continuation", "the mat."},
                {"gold", 1}})
              .dump() +
          "\n";
  const std::string choice = dir.write("choices.jsonl", lines);
  const auto best = [&](const std::string& context, const std::string& space, bool by_byte) {
    std::vector<double> losses;
    for (const std::string& c : choices)
      losses.push_back(read(decoder, context, space + c).loss /
                       (by_byte ? static_cast<double>(c.size()) : 1));
    return std::min_element(losses.begin(), losses.end()) - losses.begin();
  };
  const bool schema =
      read(decoder, "the cat sat on", " the mat.").loss < read(decoder, "the dog sat on", " the mat.").loss;
  const std::string question = "Question: who?\nAnswer:";
  const double acc = (best(question, " ", false) == 1) + (best("the cat sat on", " ", false) == 1) + schema;
  const double norm = (best(question, " ", true) == 1) + (best("the cat sat on", " ", true) == 1) + schema;
  CHECK(acc != norm);

  for (const Args& shape :
       {Args{}, Args{"--batch", "1", "--seq", "5"}, Args{"--batch", "3", "--seq", "64"}}) {
    const json rows = dir.eval("trained", Args{"--data", lambada, choice} + shape);
    REQUIRE(rows.size() == 2);
    CHECK(rows[0]["task"] == "lambada");
    CHECK(rows[0]["acc"] == right / 4);
    CHECK(rows[0]["acc_stderr"].get<double>() == doctest::Approx(std::sqrt(right / 4 * (1 - right / 4) / 3)));
    CHECK(rows[0]["perplexity"].get<double>() == doctest::Approx(std::exp(loss / 4)).epsilon(1e-11));
    CHECK(rows[1]["task"] == "choice");
    CHECK(rows[1]["acc"].get<double>() == doctest::Approx(acc / 3));
    CHECK(rows[1]["acc_norm"].get<double>() == doctest::Approx(norm / 3));
    CHECK(rows[1]["chance"].get<double>() == doctest::Approx((1. / 3 + 1. / 3 + 1. / 2) / 3));
  }
  CHECK(dir.eval("trained", {"--data", choice, "--limit", "1"})[0]["examples"] == 1);
  const json other = dir.eval("trained", {"--data", choice, "--limit", "1", "--delimiter", "?!"});
  CHECK(other[0]["acc"] == (best("Question: who?", "?!", false) == 1 ? 1.0 : 0.0));
}

TEST_CASE("eval choice: a model with random weights scores chance, its error as stated") {
  const Desk dir;
  std::string lines;
  for (uint64_t i = 0; i < 600; ++i) {
    Args choices;
    for (uint64_t c = 0; c < 4; ++c) choices.push_back(random_word(4 * i + c, 6));
    lines +=
        json({{"query", random_word(7000 + i, 12)}, {"choices", choices}, {"gold", i * 7 % 4}}).dump() + "\n";
  }
  const json row = dir.eval("random", {"--data", dir.write("random.jsonl", lines)})[0];
  const double error = row["acc_stderr"].get<double>();
  CHECK(error == doctest::Approx(std::sqrt(0.25 * 0.75 / 600)).epsilon(0.2));
  CHECK(std::abs(row["acc"].get<double>() - 0.25) < 4 * error);
  CHECK(row["acc_norm"] == row["acc"]);  // choices of one length
  CHECK(row["chance"] == 0.25);
}

TEST_CASE("eval: what cannot be asked is one line with file and example") {
  const Desk dir;
  const auto error = [&](const std::string& lines, const Args& more = {}) {
    const std::string file = dir.write("bad.jsonl", lines);
    const std::string message = error_of([&] { dir.eval("random", Args{"--data", file} + more); });
    CHECK(message.starts_with(file));
    return message.substr(file.size());
  };
  const std::string good = R"({"query": "a", "choices": ["b", "c"], "gold": 0})";
  CHECK(error(good + "\n" + R"({"query": "a", "choices": ["b", "c"], "gold": 2})") ==
        ": example 2: gold: expected one of 2 choices, got 2");
  CHECK(error(R"({"query": "a", "choices": ["b", ""], "gold": 0})") ==
        ": example 1: expected a continuation, got no text");
  CHECK(error(R"({"choices": ["b", "c"], "gold": 0})") == ": example 1: no field \"query\"");
  CHECK(error(good, {"--task", "lambada"}) == ": example 1: no field \"context\"");
  CHECK(error(good + "\n{\"query\": ").starts_with(": line 2: not JSON"));
  CHECK(error("", {"--task", "choice"}) == ": no examples in it");
  CHECK_THROWS_WITH(dir.eval("random", {"--data", "x", "--limit", "0"}),
                    "--limit: expected more than 0, got 0");
}

TEST_CASE("eval: the benchmark files run, with bytes and with a SentencePiece model") {
  const std::string shared = "../shared/data/";
  if (!std::filesystem::exists(shared + "eval")) {
    MESSAGE("skipped: no " << shared << "eval");
    return;
  }
  const Desk dir;
  const auto wide = nlohmann::ordered_json::parse(read_file(dir / "config.json"));
  auto config = wide;
  config["vocab_size"] = 32000, config["bos_token_id"] = 1, config["eos_token_id"] = 2;
  dir.write("wide.json", config.dump());
  run(dir, {"init", "--config", dir / "wide.json", "--out", dir / "wide"});
  std::filesystem::copy(shared + "tokenizer/mistral-v1.model", dir / "wide/tokenizer.model");
  Args files;
  for (const auto& entry : std::filesystem::directory_iterator(shared + "eval"))
    if (entry.path().extension() == ".jsonl") files.push_back(entry.path());
  for (const char* model : {"random", "wide"}) {
    const json rows = dir.eval(model, Args{"--data"} + files + Args{"--limit", "3"});
    REQUIRE(rows.size() == files.size());
    for (const json& row : rows) CHECK((row["examples"] == 3 && row["task"] != "ppl"));
  }
}

TEST_CASE("generate: greedy, with penalty and across interactive turns, writes what the decoder says") {
  const Desk dir;
  const std::unique_ptr<Model> model = load_model(dir / "random", Device::cpu, DType::f32, false);
  const auto expected = [&](const Args& turns, double penalty, int tokens) {
    Decoder decoder(*model);
    std::vector<int32_t> ids;
    std::string text;
    for (const std::string& turn : turns) {
      std::vector<int32_t> more = {256};
      if (!ids.empty()) more = {'\n'};
      Tokenizer().encode(turn, more);
      std::string answer;
      for (int i = 0; i <= tokens; ++i) {
        ids.insert(ids.end(), more.begin(), more.end());
        std::vector<double> logits = decoder.feed(more);
        if (i == tokens) break;
        std::vector<int32_t> seen = ids;
        std::sort(seen.begin(), seen.end());
        seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
        for (int32_t id : seen) {
          double& x = logits[static_cast<size_t>(id)];
          x = x > 0 ? x / penalty : x * penalty;
        }
        more = {static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin())};
        if (more[0] >= 256) break;
        answer += static_cast<char>(more[0]);
      }
      text += valid_utf8(answer) + "\n";
    }
    return text;
  };
  const Args greedy = {"--temperature", "0", "--tokens", "12"};
  CHECK(dir.generate("random", greedy + Args{"--prompt", "ab"}) == "ab" + expected({"ab"}, 1, 12));
  CHECK(dir.generate("random", greedy + Args{"--prompt", "ab", "--repetition-penalty", "1.7"}) ==
        "ab" + expected({"ab"}, 1.7, 12));
  CHECK(expected({"ab"}, 1.7, 12) != expected({"ab"}, 1, 12));
  CHECK(dir.generate("random", greedy + Args{"--prompt-file", dir.write("prompt", "ab\n")}) ==
        "ab\n" + expected({"ab\n"}, 1, 12));
  const Args turns = {"ab", "", "the cat"};
  const std::string talk = dir.generate("random", greedy + Args{"--interactive"}, "ab\n\nthe cat\n");
  CHECK(talk == expected(turns, 1, 12));
  CHECK(expected({"the cat"}, 1, 12) != expected(turns, 1, 12).substr(talk.size() - 13));  // the state counts
  CHECK(dir.generate("random", greedy + Args{"--interactive"}) == "");
  // Off is off: the greedy draw with every cut switched off, and a draw that only the likeliest survives.
  CHECK(dir.generate("random", {"--prompt", "ab", "--tokens", "12", "--top-k", "1", "--temperature", "2"}) ==
        "ab" + expected({"ab"}, 1, 12));
}

TEST_CASE("generate: stops end before the string, samples differ and repeat, output is whole characters") {
  const Desk dir;
  const Args greedy = {"--prompt", "the cat sat on the mat. the", "--temperature", "0", "--tokens", "40"};
  const std::string free = dir.generate("trained", greedy);
  REQUIRE(free.find(" sat on") != free.npos);
  const auto until = [&](const std::string& stop) { return free.substr(0, free.find(stop, 27)) + "\n"; };
  CHECK(dir.generate("trained", greedy + Args{"--stop", "sat"}) == until("sat"));
  CHECK(dir.generate("trained", greedy + Args{"--stop", "dog", "--stop", "on t"}) == until("on t"));
  CHECK(dir.generate("trained", greedy + Args{"--stop", "sat on a"}) == free);
  const Args draws = {"--prompt",      "x", "--tokens", "30", "--samples", "3",
                      "--temperature", "1", "--top-p",  "1"};
  const std::string samples = dir.generate("random", draws);
  CHECK(samples == dir.generate("random", draws));
  CHECK(samples != dir.generate("random", draws + Args{"--seed", "1"}));
  CHECK(find_invalid_utf8(samples) == samples.npos);
  Args parts;
  for (int s = 1; s <= 3; ++s) {
    const size_t at = samples.find(cat("--- sample ", s, " of 3\n"));
    REQUIRE(at != samples.npos);
    parts.push_back(
        samples.substr(at + 18, s < 3 ? samples.find("--- sample", at + 1) - at - 18 : samples.npos));
    CHECK(parts.back().starts_with("x"));
  }
  CHECK((parts[0] != parts[1] && parts[1] != parts[2] && parts[0] != parts[2]));
  CHECK_THROWS_WITH(dir.generate("random", {"--stop", ""}), "--stop: expected some text, got none");
  CHECK_THROWS_WITH(dir.generate("random", {"--temperature", "nan"}),
                    "--temperature: expected 0 or more, got nan");
  CHECK_THROWS_WITH(dir.generate("random", {"--repetition-penalty", "0"}),
                    "--repetition-penalty: expected more than 0, got 0");
  CHECK_THROWS_AS(dir.generate("random", {"--samples", "2", "--interactive"}), CLI::ParseError);
  CHECK_THROWS_AS(sample(std::vector<double>{1, NAN}, {}, 0), Error);
}

TEST_CASE("stops: for any pieces the text ends before the first stop string, and nothing after it is shown") {
  const Args strings = {"aab", "abab", "\u4f60", "zz"};
  for (const std::string text :
       {"xaaab more", "abaabab", "aa", "ababab", "caf\u00e9 \u4f60 z", "az", "zazz", ""})
    for (size_t size : {1, 2, 3, 100}) {
      CAPTURE(cat(text, " by ", size));
      size_t end = text.size();
      for (const std::string& s : strings) end = std::min(end, text.find(s));
      Stops stops(strings);
      std::string shown;
      for (size_t at = 0; at < text.size(); at += size) {
        shown += stops.next(text.substr(at, size));
        CHECK(text.substr(0, end).starts_with(shown));
      }
      CHECK(stops.met() == (end < text.size()));
      CHECK(shown + stops.finish() == text.substr(0, end));
    }
  CHECK(valid_utf8("a\xff\u00e9\xe4\xbd") == "a\ufffd\u00e9\ufffd\ufffd");
}
