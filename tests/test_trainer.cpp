// Training through the command line: what changes the weights, what must not, and how runs end and go on.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <thread>

#include "src/commands.h"
#include "src/compare.h"
#include "src/decoder.h"
#include "src/run_log.h"
#include "src/train_state.h"
#include "tensor/rng.h"
#include "tests/temporary.h"

using namespace prism;
using Args = std::vector<std::string>;
namespace fs = std::filesystem;

namespace {

std::string content(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Standard output goes nowhere while it lives: runs report there.
class Quiet {
 public:
  Quiet() : saved_(::dup(STDOUT_FILENO)) {
    std::fflush(stdout);
    const int nowhere = ::open("/dev/null", O_WRONLY);
    ::dup2(nowhere, STDOUT_FILENO);
    ::close(nowhere);
  }
  Quiet(const Quiet&) = delete;
  ~Quiet() {
    std::fflush(stdout);
    ::dup2(saved_, STDOUT_FILENO);
    ::close(saved_);
  }

 private:
  int saved_;
};

// Two layers, rank 2, 13,000 weights; a text of words with some order in it.
struct Workshop : TemporaryDirectory {
  Workshop() {
    write(*this / "config.json",
          R"({"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 8,
              "expand_v": 2, "intermediate_size": 24, "bos_token_id": 256, "eos_token_id": 257,
              "tie_word_embeddings": true, "mixers": "prism", "rank": 2, "solver_dim": 4})");
    std::string text;
    for (uint64_t i = 0; text.size() < 4000; ++i)
      text +=
          std::string(1 + i % 7, static_cast<char>('a' + random_below(26, 1, 1, i))) + (i % 9 ? " " : ".\n");
    write(*this / "text.txt", text);
  }
  // train of 20 steps of 2 x 2 x 16 positions; an epoch is 57 steps. `more` goes before.
  Args train(const std::string& out, const Args& more = {}) const {
    Args args = {"--data",       *this / "text.txt",
                 "--out",        *this / out,
                 "--steps",      "20",
                 "--batch",      "2",
                 "--seq",        "16",
                 "--accumulate", "2",
                 "--lr",         "0.01",
                 "--warmup",     "3",
                 "--eval-every", "5",
                 "--threads",    "1"};
    if (!fs::exists(*this / out + "/config.json"))
      args.insert(args.end(), {"--config", *this / "config.json"});
    for (size_t i = 0; i < args.size(); i += 2)
      if (std::find(more.begin(), more.end(), args[i]) != more.end())
        args.erase(args.begin() + i, args.begin() + i + 2), i -= 2;
    args.insert(args.begin(), "train");
    args.insert(args.end(), more.begin(), more.end());
    return args;
  }
};

// The exit status, and the message of an error.
int run(Args args, std::string* message = nullptr) {
  CLI::App app;
  add_train(app), add_init(app);
  std::reverse(args.begin(), args.end());
  const Quiet quiet;
  try {
    app.parse(args);
    return 0;
  } catch (const Exit& e) {
    return e.code;
  } catch (const CLI::ParseError& e) {
    if (message) *message = e.what();
    return 2;
  } catch (const Error& e) {
    if (message) *message = e.what();
    return dynamic_cast<const UsageError*>(&e) ? 2 : 1;
  }
}

int run_resumed(const Workshop& shop, const std::string& out, const Args& more = {},
                std::string* message = nullptr) {
  Args args = {"train", "--resume", "--out", shop / out};
  args.insert(args.end(), more.begin(), more.end());
  return run(args, message);
}

// Weights, moments, trainer state and what was logged of each step, speed left out.
struct Result {
  std::string weights, moments, state, log;
  explicit Result(const std::string& out)
      : weights(content(out + "/model.safetensors")),
        moments(content(out + "/optimizer.safetensors")),
        state(content(out + "/trainer_state.json")) {
    for (auto line : read_log(out + "/log.jsonl")) {
      line.erase("tokens_per_second");
      line.erase("seconds_left");
      log += line.dump() + "\n";
    }
  }
};

void check_equal(const Result& a, const Result& b) {
  CHECK_MESSAGE(a.weights == b.weights, "weights");  // bytes, not for printing
  CHECK_MESSAGE(a.moments == b.moments, "moments");
  CHECK(a.state == b.state);
  CHECK(a.log == b.log);
}

std::vector<float> tensor(const std::string& path, const std::string& name) {
  const SafetensorsFile file(path);
  std::vector<float> out(static_cast<size_t>(file.info(name).shape.numel()));
  file.read(name, {out.data(), file.info(name).shape, DType::f32, Device::cpu});
  return out;
}

// build/prism, which lies beside this runner.
pid_t spawn(const Args& args) {
  std::string program = fs::read_symlink("/proc/self/exe").parent_path() / "prism";
  REQUIRE(fs::exists(program));
  std::vector<char*> argv = {program.data()};
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (int fd : {STDOUT_FILENO, STDERR_FILENO})
    posix_spawn_file_actions_addopen(&actions, fd, "/dev/null", O_WRONLY, 0);
  pid_t pid = -1;
  REQUIRE(posix_spawn(&pid, program.c_str(), &actions, nullptr, argv.data(), environ) == 0);
  posix_spawn_file_actions_destroy(&actions);
  return pid;
}

int wait_for(pid_t pid) {
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status;
}

// Returns when the file holds the text, or after a minute: the checks that follow then fail in place of
// hanging.
void wait_for_text(const std::string& path, const std::string& text) {
  for (int i = 0; i < 60000 && (!fs::exists(path) || content(path).find(text) == std::string::npos); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

TEST_CASE("train: 8 rows give the same step as 2 x 4 and 8 x 1 micro-batches, uneven targets included") {
  // 90 ids of training text: five windows of 16 and a short one, so two of the eight rows have no targets.
  const Workshop shop;
  write(shop / "text.txt", content(shop / "text.txt").substr(0, 100));
  const auto out = [](int accumulate) { return "a" + std::to_string(accumulate); };
  for (const int accumulate : {1, 2, 4, 8})
    REQUIRE(run(shop.train(out(accumulate),
                           {"--steps", "1", "--warmup", "0", "--batch", std::to_string(8 / accumulate),
                            "--accumulate", std::to_string(accumulate)})) == 0);
  // A fresh model knows nothing: log 258, less a little as a tied head leans to the token it has just read.
  // Another divisor than the number of targets that are there (90 of 128) would show.
  for (const int accumulate : {1, 2, 4, 8})
    CHECK(read_log(shop / out(accumulate) + "/log.jsonl").front()["loss"].get<double>() ==
          doctest::Approx(std::log(258)).epsilon(0.05));
  for (const std::string file : {"/model.safetensors", "/optimizer.safetensors"}) {
    const SafetensorsFile whole(shop / "a1" + file);
    for (const std::string& name : whole.names())
      for (const int accumulate : {2, 4, 8}) {
        CAPTURE(name);
        CAPTURE(accumulate);
        // Sums of the same float32 products in another order.
        CHECK(relative_error(std::span<const float>(tensor(shop / out(accumulate) + file, name)),
                             std::span<const float>(tensor(shop / "a1" + file, name))) <= 1e-5);
      }
  }
}

TEST_CASE("train: weights, moments and log are bit-identical for 1 and 2 threads") {
  const Workshop shop;
  REQUIRE(run(shop.train("one", {"--threads", "1", "--steps", "40"})) == 0);
  REQUIRE(run(shop.train("two", {"--threads", "2", "--steps", "40"})) == 0);
  check_equal(Result(shop / "one"), Result(shop / "two"));
  REQUIRE(run(shop.train("other", {"--steps", "40", "--seed", "1"})) == 0);
  CHECK_MESSAGE(Result(shop / "one").weights != Result(shop / "other").weights, "the seed matters");
}

TEST_CASE("train: it learns: the validation loss falls below the bigram's entropy of letters") {
  const Workshop shop;
  REQUIRE(run(shop.train("run", {"--steps", "60"})) == 0);
  const auto log = read_log(shop / "run/log.jsonl");
  CHECK(log.back()["val_loss"] < 0.6 * log.front()["loss"].get<double>());
  CHECK(content(shop / "run/loss.svg").ends_with("</svg>\n"));
}

TEST_CASE("train: stopped and resumed twice equals the run in one piece, bit for bit") {
  const Workshop shop;
  // 90 steps: resumed in the middle of the first epoch and of the second.
  const Args steps = {"--steps", "90", "--log-every", "1"};
  REQUIRE(run(shop.train("whole", steps)) == 0);
  Args first = steps;
  first.insert(first.end(), {"--stop-after", "33", "--threads", "1"});
  REQUIRE(run(shop.train("parts", first)) == 0);
  CHECK(read_state(shop / "parts").step == 33);
  REQUIRE(run_resumed(shop, "parts", {"--stop-after", "61"}) == 0);
  // Everything may be given again, too.
  REQUIRE(run(shop.train("parts", {"--steps", "90", "--log-every", "1", "--resume"})) == 0);
  check_equal(Result(shop / "whole"), Result(shop / "parts"));
}

TEST_CASE("train: lines of the log after the resumed step are dropped, and half a line is") {
  const Workshop shop;
  REQUIRE(run(shop.train("whole", {"--log-every", "1"})) == 0);
  REQUIRE(run(shop.train("run", {"--log-every", "1", "--stop-after", "8"})) == 0);
  std::ofstream(shop / "run/log.jsonl", std::ios::app) << "{\"step\": 9, \"loss\": 7}\n{\"step\": 10, \"lo";
  REQUIRE(run_resumed(shop, "run", {"--log-every", "1"}) == 0);
  check_equal(Result(shop / "whole"), Result(shop / "run"));
  CHECK(read_log(shop / "run/log.jsonl").size() == 20);
}

TEST_CASE("train: on resume a changed setting is refused by name, saved and given value, unless allowed") {
  const Workshop shop;
  REQUIRE(run(shop.train("run", {"--stop-after", "4"})) == 0);
  const Result before(shop / "run");
  const std::vector<std::array<std::string, 3>> changes = {
      {"batch", "2", "4"},          {"seq", "16", "8"},
      {"accumulate", "2", "1"},     {"steps", "20", "30"},
      {"lr", "0.01", "0.02"},       {"min-lr", "0.001", "0"},
      {"warmup", "3", "2"},         {"schedule", "\"cosine\"", "wsd"},
      {"weight-decay", "0.1", "0"}, {"beta1", "0.9", "0.8"},
      {"beta2", "0.95", "0.9"},     {"clip", "1.0", "2"},
      {"seed", "0", "1"},           {"dtype", "\"f32\"", "f64"}};
  std::string message;
  for (const auto& [name, saved, given] : changes) {
    CAPTURE(name);
    CHECK(run_resumed(shop, "run", {"--" + name, given}, &message) == 1);
    CHECK(message.starts_with("--" + name + ": expected " + saved + " as when the run was saved, got "));
    CHECK(message.find(given) != message.npos);
  }
  CHECK(run_resumed(shop, "run", {"--preset", "tiny"}, &message) == 1);
  CHECK(message.find("expected") != message.npos);
  check_equal(Result(shop / "run"), before);

  CHECK(run_resumed(shop, "run", {"--batch", "4", "--steps", "10", "--allow-change", "batch"}, &message) ==
        1);
  CHECK(message.starts_with("--steps: "));
  CHECK(run_resumed(shop, "run", {"--batch", "4", "--steps", "10", "--allow-change", "batch", "steps"}) == 0);
  const TrainState state = read_state(shop / "run");
  CHECK(state.step == 10);
  CHECK(state.settings.recipe.batch == 4);
  CHECK(state.loader.window == 4 * 2 * 2 + 6 * 4 * 2);
}

TEST_CASE(
    "train: on resume other data is refused, also at the same path and of the same length, unless allowed") {
  const Workshop shop;
  REQUIRE(run(shop.train("run", {"--stop-after", "4"})) == 0);
  std::string text = content(shop / "text.txt"), message;
  text[1000] ^= 1;
  write(shop / "text.txt", text);
  CHECK(run_resumed(shop, "run", {}, &message) == 1);
  CHECK(message.starts_with("--data: "));
  REQUIRE(run_resumed(shop, "run", {"--allow-change", "data"}) == 0);
  CHECK(read_state(shop / "run").loader.epoch == 1);

  // One id of many, wherever it stands.
  std::vector<int32_t> ids(400'001, 7);
  const auto write_shard = [&] {
    ShardWriter shard(shop / "ids.bin", 2);
    shard.append(ids.data(), static_cast<int64_t>(ids.size()));
    shard.finish();
  };
  write_shard();
  REQUIRE(run(shop.train("ids", {"--data", shop / "ids.bin", "--stop-after", "1"})) == 0);
  for (const size_t changed : {0, 5'000, 65'536, 359'999}) {  // the last tenth is validation
    ++ids[changed];
    write_shard();
    CAPTURE(changed);
    CHECK(run_resumed(shop, "ids", {}, &message) == 1);
    CHECK(message.starts_with("--data: expected the data that the run was saved with"));
    --ids[changed];
  }
  write_shard();
  CHECK(run_resumed(shop, "ids", {"--stop-after", "2"}) == 0);
}

TEST_CASE("train: SIGINT and SIGTERM finish the step and save; the run then goes on exactly") {
  const Workshop shop;
  REQUIRE(run(shop.train("whole", {"--steps", "200"})) == 0);
  for (const auto& [signal, code] : {std::pair(SIGINT, 130), std::pair(SIGTERM, 143)}) {
    const std::string out = "run" + std::to_string(signal);
    std::thread sender([&] {
      wait_for_text(shop / out + "/log.jsonl", "\"step\":5,");
      ::kill(::getpid(), signal);
    });
    CHECK(run(shop.train(out, {"--steps", "200"})) == code);
    sender.join();
    const int64_t step = read_state(shop / out).step;
    CHECK(step >= 5);
    CHECK(step < 200);
    REQUIRE(run_resumed(shop, out) == 0);
    CHECK_MESSAGE(content(shop / out + "/model.safetensors") == content(shop / "whole/model.safetensors"),
                  "weights");
  }
}

TEST_CASE(
    "train: ten steps in a row without a finite gradient end the run, naming step and last checkpoint") {
  const Workshop shop;
  REQUIRE(run(shop.train("run", {"--stop-after", "5", "--schedule", "constant"})) == 0);
  std::string message;
  CHECK(run_resumed(shop, "run", {"--lr", "1e30", "--allow-change", "lr", "--save-every", "3"}, &message) ==
        1);
  CHECK(message.starts_with("step 16: expected a finite loss and gradient, got loss "));
  CHECK(message.ends_with("10 steps in a row without an update; the last good checkpoint is " +
                          (shop / "run/step-000006")));
  // A bad weight from the start: there is no good checkpoint, and none is written.
  REQUIRE(run(shop.train("first", {"--steps", "1"})) == 0);
  std::string weights = content(shop / "first/model.safetensors");
  weights.replace(weights.size() - 4, 4, std::string("\0\0\xc0\x7f", 4));
  fs::create_directory(shop / "bad");
  write(shop / "bad/model.safetensors", weights);
  fs::copy(shop / "config.json", shop / "bad");
  CHECK(run({"train", "--model", shop / "bad", "--data", shop / "text.txt", "--out", shop / "nan", "--seq",
             "16", "--save-every", "1"},
            &message) == 1);
  CHECK(message.starts_with("step 10: "));
  CHECK(message.ends_with("the last good checkpoint is none"));
  CHECK(!fs::exists(shop / "nan/model.safetensors"));
}

TEST_CASE("train: killed at any moment, the run goes on from a complete checkpoint to the same weights") {
  const Workshop shop;
  const Args settings = {"--steps", "300", "--save-every", "2", "--eval-every", "50"};
  REQUIRE(run(shop.train("whole", settings)) == 0);
  const Args begin = shop.train("run", settings);
  const char* wanted = std::getenv("PRISM_KILLS");
  const uint64_t kills = wanted ? std::stoull(wanted) : 6;
  int64_t saved = 0, finished = 0;
  for (uint64_t kill = 0; kill < kills; ++kill) {
    const bool begun = fs::exists(shop / "run/current");
    const pid_t pid =
        spawn(begun ? Args{"train", "--resume", "--out", shop / "run", "--threads", "1"} : begin);
    std::this_thread::sleep_for(std::chrono::microseconds(20'000 + random_below(150'000, 5, 0, kill)));
    ::kill(pid, SIGKILL);
    wait_for(pid);
    if (!fs::exists(shop / "run/current")) continue;
    const TrainState state = read_state(newest_checkpoint(shop / "run"));
    CHECK(state.step >= saved);
    saved = state.step;
    if (saved == 300) {  // this one is done: the next one begins anew
      CHECK_MESSAGE(content(shop / "run/model.safetensors") == content(shop / "whole/model.safetensors"),
                    "weights");
      fs::remove_all(shop / "run");
      saved = 0, ++finished;
    }
  }
  MESSAGE(kills, " kills, ", finished, " runs finished between them");
  REQUIRE((fs::exists(shop / "run/current") ? run_resumed(shop, "run") : run(shop.train("run", settings))) ==
          0);
  check_equal(Result(shop / "run"), Result(shop / "whole"));
}

TEST_CASE("train: a second signal ends the process at once and leaves the last checkpoint") {
  const Workshop shop;
  const pid_t pid = spawn(shop.train("run", {"--steps", "100000", "--save-every", "1"}));
  wait_for_text(shop / "run/config.json", "model_type");
  // Both wait for it when it goes on; the first one is then handled, the other one has its default action.
  for (const int signal : {SIGSTOP, SIGINT, SIGTERM, SIGCONT}) ::kill(pid, signal);
  CHECK(WIFSIGNALED(wait_for(pid)));
  const std::string newest = newest_checkpoint(shop / "run");
  CHECK(read_state(newest).step >= 1);
  CHECK(SafetensorsFile(newest + "/model.safetensors").contains("model.norm.weight"));
}

TEST_CASE("train: wrong input is one line that names the place, and existing files stay") {
  const Workshop shop;
  REQUIRE(run(shop.train("run", {"--steps", "2"})) == 0);
  const Result before(shop / "run");
  std::string message;
  const auto fails = [&](const Args& args, int code, const std::string& expected) {
    CAPTURE(expected);
    message.clear();
    CHECK(run(args, &message) == code);
    CAPTURE(message);
    CHECK(message.find(expected) != message.npos);
    CHECK(message.find('\n') == message.npos);
  };
  fails({"train", "--config", shop / "config.json", "--data", shop / "text.txt", "--out", shop / "run"}, 1,
        "expected no model");
  fails({"train", "--out", shop / "x", "--data", shop / "text.txt"}, 2,
        "one of --preset, --config and --model");
  fails({"train", "--preset", "tiny", "--out", shop / "x"}, 2,
        "--data: expected at least one path, got none");
  fails({"train", "--preset", "huge", "--data", shop / "text.txt", "--out", shop / "x"}, 1,
        "expected one of tiny");
  fails({"train", "--out", shop / "x", "--resume"}, 1, "expected a checkpoint to resume from");
  fails(shop.train("y", {"--data", shop / "none.txt"}), 1, "none.txt");
  fails(shop.train("y", {"--seq", "5000"}), 1, "text.txt");
  fails(shop.train("y", {"--schedule", "step"}), 2, "--schedule: expected cosine");
  fails(shop.train("y", {"--beta2", "1"}), 2, "--beta2: expected 0 to below 1, got 1");
  fails(shop.train("y", {"--lr", "nan"}), 2, "--lr: expected a number of at least 0, got nan");
  fails(shop.train("y", {"--batch", "0"}), 2, "--batch: expected 1 to");
  fails(shop.train("y", {"--batch", "50000000"}), 1, "a smaller --batch");
  write(shop / "other.json", R"({"vocab_size": 300, "hidden_size": 16, "num_heads": 2, "head_dim": 8})");
  fails({"train", "--config", shop / "other.json", "--data", shop / "text.txt", "--out", shop / "z"}, 1,
        "bos_token_id 256");
  for (const char* refused : {"x", "y", "z"}) CHECK(!fs::exists(shop / refused));
  check_equal(Result(shop / "run"), before);
}

TEST_CASE("train: --model begins a new run with a checkpoint's weights") {
  const Workshop shop;
  REQUIRE(run(shop.train("base", {"--steps", "30"})) == 0);
  REQUIRE(run({"train", "--model", shop / "base", "--data", shop / "text.txt", "--out", shop / "more",
               "--seq", "16", "--steps", "1", "--lr", "0"}) == 0);
  CHECK_MESSAGE(content(shop / "more/model.safetensors") == content(shop / "base/model.safetensors"),
                "weights");
  CHECK(read_state(shop / "more").taken == 1);
}

namespace {

std::vector<double> logits(const std::string& dir) {
  const auto model = load_model(dir, Device::cpu, DType::f64, false);
  return Decoder(*model).feed(std::vector<int32_t>{256, 104, 101, 108, 108, 111, 32, 98, 97, 115, 101});
}

}  // namespace

TEST_CASE("init --from: a bypass changes no logit; --freeze base trains it alone, exactly resumed") {
  const Workshop shop;
  write(shop / "config.json",
        std::regex_replace(content(shop / "config.json"), std::regex("\"prism\", \"rank\": 2"),
                           "\"gdn\", \"rank\": 1"));
  REQUIRE(run(shop.train("base")) == 0);
  REQUIRE(run({"init", "--from", shop / "base", "--rank", "3", "--solver-dim", "4", "--out",
               shop / "bypass"}) == 0);
  // Its writes are 0, added in sums of another length.
  CHECK(relative_error<double, double>(logits(shop / "bypass"), logits(shop / "base")) <= 1e-13);

  const auto tune = [&](const char* out, const Args& more) {
    Args args = {"train", "--model",  shop / "bypass", "--freeze", "base",    "--data", shop / "text.txt",
                 "--out", shop / out, "--seq",         "16",       "--steps", "12",     "--lr",
                 "0.01"};
    args.insert(args.end(), more.begin(), more.end());
    return run(args);
  };
  REQUIRE(tune("tuned", {}) == 0);
  const SafetensorsFile before(shop / "bypass/model.safetensors"), after(shop / "tuned/model.safetensors");
  for (const std::string& name : before.names()) {
    INFO(name);
    const bool same = tensor(before.path(), name) == tensor(after.path(), name);
    CHECK(same == (name.find(".solver.") == std::string::npos));
  }
  const SafetensorsFile moments(shop / "tuned/optimizer.safetensors");
  for (const std::string& name : moments.names())
    CHECK_MESSAGE(name.find(".solver.") != std::string::npos, name, " has moments");
  CHECK(logits(shop / "tuned") != logits(shop / "base"));

  REQUIRE(tune("halves", {"--stop-after", "5"}) == 0);
  REQUIRE(run_resumed(shop, "halves") == 0);
  check_equal(Result(shop / "halves"), Result(shop / "tuned"));
}

TEST_CASE(
    "train --train-only: the named weights move, a fused projection's other rows too stay; no match is "
    "refused") {
  const Workshop shop;
  REQUIRE(run(shop.train("base")) == 0);
  const Args args = {"train", "--model", shop / "base", "--data", shop / "text.txt",
                     "--seq", "16",      "--steps",     "3"};
  Args some = args, none = args;
  some.insert(some.end(),
              {"--out", shop / "some", "--train-only", "layers.1.attn.k_proj", "layers.0.mlp_norm"});
  none.insert(none.end(), {"--out", shop / "none", "--train-only", "layers.7."});
  REQUIRE(run(some) == 0);
  const SafetensorsFile base(shop / "base/model.safetensors");
  for (const std::string& name : base.names()) {
    INFO(name);
    const bool same =
        tensor(shop / "base/model.safetensors", name) == tensor(shop / "some/model.safetensors", name);
    CHECK(same == (name != "model.layers.1.attn.k_proj.weight" && name != "model.layers.0.mlp_norm.weight"));
  }
  std::string message;
  CHECK(run(none, &message) == 1);
  CHECK(message == "--train-only: expected a part of a weight's name, got layers.7.");
}
