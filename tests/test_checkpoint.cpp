#include "src/checkpoint.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "tests/temporary.h"

using namespace prism;
namespace fs = std::filesystem;

namespace {

// A checkpoint whose every file tells its step; odd steps have one file more, so the set of links changes
// too.
std::vector<CheckpointFile> files_of(int64_t step, size_t bytes = 5000) {
  const auto content = [=](OutputFile& file) {
    const std::string text = cat(step, "\n");
    file.write(text);
    file.write(std::string(bytes - text.size(), 'x'));
  };
  std::vector<CheckpointFile> files = {
      {"config.json", content}, {"model.safetensors", content}, {"trainer_state.json", content}};
  if (step % 2) files.push_back({"optimizer.safetensors", content});
  return files;
}

// The step that the files at `dir` tell; fails where they are of two, cut short, too few or too many.
int64_t step_at(const std::string& dir, size_t bytes = 5000) {
  const int64_t step = std::stoll(read_text(dir + "/config.json", bytes));
  for (const CheckpointFile& file : files_of(step)) {
    CAPTURE(file.name);
    const std::string text = read_text(dir + "/" + file.name, bytes);
    CHECK(text.size() == bytes);
    CHECK(std::stoll(text) == step);
  }
  return step;
}

std::vector<std::string> listed(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Memory where there is some: flushing thousands of files to a disk takes minutes, and a kill does not ask.
fs::path fast_disk() { return fs::is_directory("/dev/shm") ? "/dev/shm" : fs::temp_directory_path(); }

// Runs `child` in a process of its own, stopped before its first step.
pid_t start(const std::function<void()>& child) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(1);
  ::raise(SIGSTOP);
  try {
    child();
  } catch (...) {
    ::_exit(1);
  }
  ::_exit(0);
}

// What must hold of OUT after a kill: both ways to read it give one whole checkpoint, and the next writer
// finds the newest, leaves no debris and can go on. Returns the step found.
int64_t check_after_kill(const std::string& out) {
  const int64_t seen = step_at(out), newest = step_at(newest_checkpoint(out));
  CHECK(seen <= newest);
  CheckpointWriter writer(out, true);
  CHECK(step_at(out) == newest);
  CHECK(step_at(newest_checkpoint(out)) == newest);
  for (const std::string& name : listed(out)) {
    CAPTURE(name);
    CHECK_FALSE(name.starts_with(".tmp"));
    CHECK(fs::exists(out + "/" + name));
    if (name.starts_with("step-")) CHECK(step_at(out + "/" + name) == std::stoll(name.substr(5)));
  }
  return newest;
}

}  // namespace

TEST_CASE("checkpoint: OUT reads as the newest, step directories as the earlier ones, keep prunes") {
  const TemporaryDirectory dir;
  const std::string out = dir / "runs/a";
  CheckpointWriter writer(out, false);
  writer.save(0, files_of(0), 0);
  CHECK(step_at(out) == 0);
  writer.save(1, files_of(1), 0);
  CHECK(step_at(out) == 1);
  writer.save(2, files_of(2), 0);
  CHECK(step_at(out) == 2);
  CHECK(newest_checkpoint(out) == out + "/step-000002");
  CHECK(listed(out) == std::vector<std::string>{"config.json", "current", "model.safetensors", "step-000000",
                                                "step-000001", "step-000002", "trainer_state.json"});
  for (int step : {0, 1, 2}) CHECK(step_at(cat(out, "/step-00000", step)) == step);
  writer.save(1000000, files_of(1000000), 2);
  writer.save(1000001, files_of(1000001), 2);
  CHECK(listed(out) == std::vector<std::string>{"config.json", "current", "model.safetensors",
                                                "optimizer.safetensors", "step-1000000", "step-1000001",
                                                "trainer_state.json"});
  CHECK(step_at(out) == 1000001);
  CHECK(newest_checkpoint(out) == out + "/step-1000001");
}

TEST_CASE("checkpoint: a step saved twice is written once") {
  const TemporaryDirectory dir;
  CheckpointWriter writer(dir.path(), false);
  writer.save(7, files_of(7), 1);
  writer.save(7, {{"config.json", [](OutputFile&) { FAIL("written again"); }}}, 1);
  CHECK(step_at(dir.path()) == 7);
}

TEST_CASE("checkpoint: killed at any system call of a save, OUT holds one whole checkpoint and can go on") {
  const TemporaryDirectory dir(fast_disk());
  int calls = 0, old_found = 0, new_found = 0;
  for (bool finished = false; !finished; ++calls) {
    const std::string out = dir / cat(calls);
    {
      CheckpointWriter writer(out, false);
      writer.save(99, files_of(99), 0);
      writer.save(100, files_of(100), 0);
    }
    const pid_t pid = start([&] { CheckpointWriter(out, true).save(101, files_of(101), 1); });
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (!WIFSTOPPED(status)) {
      MESSAGE("skipped: this system forbids ptrace");
      return;
    }
    for (int i = 0; i < calls && !finished; ++i) {
      ::ptrace(PTRACE_SYSCALL, pid, nullptr, nullptr);
      ::waitpid(pid, &status, 0);
      finished = WIFEXITED(status);
    }
    if (finished) {
      CHECK(WEXITSTATUS(status) == 0);
    } else {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, &status, 0);
    }
    CAPTURE(calls);
    (check_after_kill(out) == 101 ? new_found : old_found)++;
    CHECK(step_at(newest_checkpoint(out)) >= 100);
    CheckpointWriter writer(out, true);
    writer.save(101, files_of(101), 1);
    writer.save(102, files_of(102), 1);
    CHECK(step_at(out) == 102);
    CHECK(listed(out) == std::vector<std::string>{"config.json", "current", "model.safetensors",
                                                  "step-000102", "trainer_state.json"});
    fs::remove_all(out);
  }
  CHECK(old_found > 50);  // system calls before the rename, and after it
  CHECK(new_found > 50);
}

TEST_CASE("checkpoint: killed at random moments of a run that saves all the time, no finished save is lost") {
  const TemporaryDirectory dir(fast_disk());
  const std::string out = dir / "out";
  // The child tells here which save it has finished.
  auto* finished = static_cast<volatile int64_t*>(
      ::mmap(nullptr, sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  CheckpointWriter(out, false).save(0, files_of(0), 2);
  std::minstd_rand random(1);
  int64_t before = 0;
  for (int kill = 0; kill < 100; ++kill) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      CheckpointWriter writer(out, true);
      for (int64_t step = before + 1;; ++step) {
        writer.save(step, files_of(step), 2);
        *finished = step;
      }
    }
    ::usleep(static_cast<useconds_t>(random() % 15000));
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    CAPTURE(kill);
    const int64_t newest = check_after_kill(out);
    CHECK(newest >= *finished);
    CHECK(newest >= before);
    before = newest;
  }
  CHECK(before > 100);
  ::munmap(const_cast<int64_t*>(finished), sizeof(int64_t));
}

TEST_CASE(
    "checkpoint: a disk that fills during a save gives one line, the previous checkpoint stays, nothing "
    "else") {
  const TemporaryDirectory dir;
  if (::mount("tmpfs", dir.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
    MESSAGE("skipped: this user may not mount a small tmpfs");
    return;
  }
  const std::string out = dir / "out";
  {
    CheckpointWriter writer(out, false);
    writer.save(100, files_of(100, 100'000), 1);
    const auto before = listed(out);
    for (size_t bytes : {300'000, 1'500'000}) {
      const std::string message = error_of([&] { writer.save(101, files_of(101, bytes), 1); });
      CAPTURE(message);
      CHECK(message.starts_with(out + "/.tmp-step-000101/"));
      CHECK(has(message, ": cannot write "));
      CHECK(has(message, " bytes after the first "));
      CHECK(message.ends_with("No space left on device"));
      CHECK_FALSE(has(message, "\n"));
      CHECK(step_at(out, 100'000) == 100);
      CHECK(listed(out) == before);
    }
    writer.save(101, files_of(101, 100'000), 1);
    CHECK(step_at(out, 100'000) == 101);
  }
  CHECK(::umount(dir.path().c_str()) == 0);
}

TEST_CASE(
    "checkpoint: a file that may not grow gives one line, the previous checkpoint stays, nothing else") {
  const TemporaryDirectory dir;
  CheckpointWriter writer(dir.path(), false);
  writer.save(100, files_of(100), 1);
  const auto before = listed(dir.path());
  struct rlimit limit;
  ::getrlimit(RLIMIT_FSIZE, &limit);
  const struct rlimit small = {6000, limit.rlim_max};
  const auto previous = ::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string message = error_of([&] { writer.save(101, files_of(101, 9000), 1); });
  ::setrlimit(RLIMIT_FSIZE, &limit);
  ::signal(SIGXFSZ, previous);
  CHECK(message ==
        dir / ".tmp-step-000101/config.json: cannot write 3000 bytes after the first 6000: File too large");
  CHECK(step_at(dir.path()) == 100);
  CHECK(listed(dir.path()) == before);
}

TEST_CASE("checkpoint: a writer that throws leaves the previous checkpoint and nothing else") {
  const TemporaryDirectory dir;
  CheckpointWriter writer(dir.path(), false);
  writer.save(100, files_of(100), 1);
  const auto before = listed(dir.path());
  auto files = files_of(101);
  files.back().write = [](OutputFile&) { PRISM_FAIL("no tensor"); };
  CHECK(error_of([&] { writer.save(101, files, 1); }) == "no tensor");
  CHECK(step_at(dir.path()) == 100);
  CHECK(listed(dir.path()) == before);
}

TEST_CASE("checkpoint: a new run refuses a directory with a model, a resumed one a directory without") {
  const TemporaryDirectory dir;
  const std::string out = dir / "out", plain = dir / "plain";
  CheckpointWriter(out, false).save(5, files_of(5), 1);
  CHECK(error_of([&] { CheckpointWriter(out, false); }) ==
        out + ": expected no model (--resume continues one), got step-000005");
  CHECK(step_at(out) == 5);

  fs::create_directory(plain);
  CHECK(error_of([&] { CheckpointWriter(plain, true); }) ==
        plain + ": expected a checkpoint to resume from, got no complete step-N directory");
  OutputFile(plain + "/config.json").write("theirs");
  CHECK(error_of([&] { CheckpointWriter(plain, false); }) == plain + ": expected no model, got config.json");
  CHECK(read_text(plain + "/config.json", 100) == "theirs");
  CHECK(error_of([&] { CheckpointWriter(plain + "/config.json", false); }) ==
        plain + "/config.json: cannot create the directory: Not a directory");
}

TEST_CASE("checkpoint: a directory made for a run that saves nothing goes, one that was there stays") {
  const TemporaryDirectory dir;
  { CheckpointWriter(dir / "new", false); }
  CHECK(!fs::exists(dir / "new"));
  CHECK(
      error_of([&] { CheckpointWriter(dir / "new", true); }).starts_with(dir / "new: expected a checkpoint"));
  CHECK(!fs::exists(dir / "new"));
  fs::create_directory(dir / "old");
  { CheckpointWriter(dir / "old", false); }
  CHECK(fs::exists(dir / "old"));
}

TEST_CASE("checkpoint: a second writer is refused while the first lives") {
  const TemporaryDirectory dir;
  {
    CheckpointWriter first(dir.path(), false);
    CHECK(error_of([&] { CheckpointWriter(dir.path(), false); }) ==
          dir.path() + ": expected to be the only run that writes there, got a second one");
  }
  CHECK(error_of([&] { CheckpointWriter(dir.path(), false); }) == "");
}

TEST_CASE("checkpoint: a directory that may not be written is refused before any work") {
  const TemporaryDirectory dir;
  const uid_t user = ::geteuid();
  const std::string locked = dir / "locked";
  fs::create_directory(locked);
  ::chmod(dir.path().c_str(), 0755);
  ::chmod(locked.c_str(), 0555);
  if (user == 0) REQUIRE(::seteuid(65534) == 0);  // permissions do not bind root
  const std::string existing = error_of([&] { CheckpointWriter(locked, false); });
  const std::string missing = error_of([&] { CheckpointWriter(locked + "/new", false); });
  if (user == 0) REQUIRE(::seteuid(0) == 0);
  CHECK(existing == locked + ": cannot write: Permission denied");
  CHECK(missing == locked + "/new: cannot create the directory: Permission denied");
}

TEST_CASE("checkpoint: a killed run's first directory, without a checkpoint, can be used again") {
  const TemporaryDirectory dir;
  fs::create_directory(dir / ".tmp-step-000010");
  OutputFile(dir / ".tmp-step-000010/config.json").write("half");
  fs::create_symlink("current/config.json", dir / "config.json");  // links come before `current`
  CheckpointWriter writer(dir.path(), false);
  CHECK(listed(dir.path()).empty());
  writer.save(10, files_of(10), 1);
  CHECK(step_at(dir.path()) == 10);
}

TEST_CASE("checkpoint: deleting the newest step directory goes back to the one before it") {
  const TemporaryDirectory dir;
  CheckpointWriter(dir.path(), false).save(10, files_of(10), 0);
  CheckpointWriter(dir.path(), true).save(11, files_of(11), 0);
  fs::remove_all(dir / "step-000011");
  CHECK(newest_checkpoint(dir.path()) == dir / "step-000010");
  CheckpointWriter writer(dir.path(), true);
  CHECK(step_at(dir.path()) == 10);
  CHECK_FALSE(fs::is_symlink(dir / "optimizer.safetensors"));
}

TEST_CASE("checkpoint: a copy that replaced the links by files is read, and repaired when resumed") {
  const TemporaryDirectory dir;
  const std::string out = dir / "out", copy = dir / "copy";
  {
    CheckpointWriter writer(out, false);
    writer.save(10, files_of(10), 0);
    writer.save(11, files_of(11), 0);
  }
  fs::copy(out, copy, fs::copy_options::recursive);
  REQUIRE_FALSE(fs::is_symlink(copy + "/current"));
  CHECK(step_at(copy) == 11);
  CHECK(step_at(newest_checkpoint(copy)) == 11);
  CheckpointWriter(copy, true).save(12, files_of(12), 1);
  CHECK(step_at(copy) == 12);
  CHECK(step_at(newest_checkpoint(copy)) == 12);
  CHECK(step_at(out) == 11);
}

TEST_CASE("checkpoint: a plain model directory is its own newest, any other place an error") {
  const TemporaryDirectory dir;
  for (const CheckpointFile& file : files_of(4)) {
    OutputFile output(dir / file.name);
    file.write(output);
  }
  CHECK(newest_checkpoint(dir.path()) == dir.path());
  CHECK(error_of([] { newest_checkpoint("no/such"); }) == "no/such: cannot list: No such file or directory");
  CHECK(error_of([&] { newest_checkpoint(dir / "config.json"); }) ==
        dir / "config.json: cannot list: Not a directory");
  fs::create_directories(dir / "empty/step-000003");
  CHECK(error_of([&] { newest_checkpoint(dir / "empty"); }) ==
        dir /
            "empty: expected config.json and model.safetensors, got neither a model nor a step-N directory "
            "that "
            "holds one");
}
