#include "src/checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>

namespace prism {

namespace fs = std::filesystem;

namespace {

constexpr const char* kTemporary = ".tmp-";

// False also for a link to nothing.
bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

bool holds_model(const std::string& dir) {
  return exists(dir + "/config.json") && exists(dir + "/model.safetensors");
}

std::vector<std::string> names_in(const std::string& dir) {
  std::error_code error;
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir, error))
    names.push_back(entry.path().filename().string());
  PRISM_CHECK(!error, dir, ": cannot list: ", error.message());
  return names;
}

// The complete checkpoints' directories, oldest first. Numbers of more than six digits sort by their length.
std::vector<std::string> step_names(const std::string& dir) {
  std::vector<std::string> steps;
  for (const std::string& name : names_in(dir))
    if (name.starts_with("step-") && name.size() > 5 &&
        name.find_first_not_of("0123456789", 5) == std::string::npos && holds_model(dir + "/" + name))
      steps.push_back(name);
  std::sort(steps.begin(), steps.end(), [](const std::string& a, const std::string& b) {
    return std::pair(a.size(), a) < std::pair(b.size(), b);
  });
  return steps;
}

void rename(const std::string& from, const std::string& to) {
  PRISM_CHECK(std::rename(from.c_str(), to.c_str()) == 0, from, ": cannot rename to ", to, ": ",
              system_reason());
}

void remove(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  PRISM_CHECK(!error, path, ": cannot remove: ", error.message());
}

// New names in a directory are on the disk only once the directory is.
void flush_directory(const std::string& path) {
  const File directory(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  PRISM_CHECK(::fsync(directory.fd()) == 0 || errno == EINVAL,  // EINVAL: this filesystem needs none
              path, ": cannot flush to disk: ", system_reason());
}

// False when it is there already.
bool make_directory(const std::string& path) {
  std::error_code error;
  const bool made = fs::create_directories(path, error);
  PRISM_CHECK(!error, path, ": cannot create the directory: ", error.message());
  return made;
}

}  // namespace

std::string newest_checkpoint(const std::string& dir) {
  const std::vector<std::string> steps = step_names(dir);
  if (!steps.empty()) return dir + "/" + steps.back();
  PRISM_CHECK(holds_model(dir), dir,
              ": expected config.json and model.safetensors, got neither a model nor a step-N "
              "directory that holds one");
  return dir;
}

CheckpointWriter::MadeDirectory::MadeDirectory(const std::string& out)
    : path(out), made(make_directory(out)) {}

CheckpointWriter::MadeDirectory::~MadeDirectory() {
  if (made) ::rmdir(path.c_str());  // fails unless it is empty
}

CheckpointWriter::CheckpointWriter(const std::string& out, bool resume)
    : made_(out), directory_(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC) {
  PRISM_CHECK(::faccessat(AT_FDCWD, out.c_str(), W_OK, AT_EACCESS) == 0, out,
              ": cannot write: ", system_reason());
  PRISM_CHECK(::flock(directory_.fd(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, out,
              ": expected to be the only run that writes there, got a second one");
  const std::vector<std::string> steps = step_names(out);
  if (resume) {
    PRISM_CHECK(!steps.empty(), out,
                ": expected a checkpoint to resume from, got no complete step-N directory");
  } else {
    PRISM_CHECK(steps.empty(), out, ": expected no model (--resume continues one), got ", steps.back());
    for (const char* name : {"config.json", "model.safetensors", "tokenizer.model", "tokenizer.json"})
      PRISM_CHECK(!exists(inside(name)), out, ": expected no model, got ", name);
  }
  clear_debris();
  if (resume) make_newest(steps.back());
}

void CheckpointWriter::save(int64_t step, const std::vector<CheckpointFile>& files, int64_t keep) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(step));
  if (!exists(inside(name))) {
    const std::string temporary = inside(kTemporary + std::string(name));
    try {
      make_directory(temporary);
      for (const CheckpointFile& file : files) {
        OutputFile output(temporary + "/" + file.name);
        file.write(output);
        output.flush();
      }
      flush_directory(temporary);
      rename(temporary, inside(name));
      flush_directory(directory_.path());
    } catch (...) {
      std::error_code ignored;  // the first error is the one to report
      fs::remove_all(temporary, ignored);
      throw;
    }
  }
  make_newest(name);
  if (keep > 0) prune(keep);
}

// Links of files that only the new checkpoint has are made first, and point to nothing until `current` is
// swapped; links of files that only older ones have go last.
void CheckpointWriter::make_newest(const std::string& step_name) const {
  for (const std::string& file : names_in(inside(step_name))) link(file, "current/" + file);
  link("current", step_name);
  flush_directory(directory_.path());
  clear_debris();
}

void CheckpointWriter::link(const std::string& name, const std::string& to) const {
  const std::string at = inside(name), temporary = inside(kTemporary + name);
  std::error_code none;
  if (fs::read_symlink(at, none) == to) return;
  if (fs::is_directory(fs::symlink_status(at, none))) remove(at);  // `current` in a copy that followed links
  PRISM_CHECK(::symlink(to.c_str(), temporary.c_str()) == 0, temporary, ": cannot link to ", to, ": ",
              system_reason());
  rename(temporary, at);
}

// Temporary names, and links to files that the newest checkpoint does not have.
void CheckpointWriter::clear_debris() const {
  for (const std::string& name : names_in(directory_.path())) {
    std::error_code none;
    const bool ours = fs::read_symlink(inside(name), none).string().starts_with("current/");
    if (name.starts_with(kTemporary) || (ours && !exists(inside(name)))) remove(inside(name));
  }
}

// By a rename first: a checkpoint half removed must not look like one.
void CheckpointWriter::prune(int64_t keep) const {
  const std::vector<std::string> steps = step_names(directory_.path());
  for (size_t i = 0; i + static_cast<size_t>(keep) < steps.size(); ++i) {
    rename(inside(steps[i]), inside(kTemporary + steps[i]));
    remove(inside(kTemporary + steps[i]));
  }
}

}  // namespace prism
