// Checkpoints on disk, such that a process killed at any moment leaves only complete ones behind.
//
//   OUT/step-000100/  OUT/step-000120/        complete checkpoints: written as OUT/.tmp-step-000120, every
//                                             file flushed to disk, then given this name by one rename
//   OUT/current -> step-000120                swapped by one rename
//   OUT/config.json -> current/config.json    one link a file, so OUT/ itself reads as the newest checkpoint,
//   OUT/model.safetensors -> current/...      and all its files change together, when `current` does
//
// Links, because several renames are not one: whoever is killed between them leaves OUT/ a mix of two
// checkpoints. Every tool that opens OUT/model.safetensors follows them (the Hugging Face cache is made of
// them), and a copy that replaces them by files (cp -rL) is still read, and repaired when it is resumed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "src/files.h"

namespace prism {

struct CheckpointFile {
  std::string name;  // "model.safetensors"
  std::function<void(OutputFile&)> write;
};

// The directory that holds the newest complete checkpoint's files: of the step directories in `dir` that with
// the highest number (also when a kill came between its rename and the links'), else `dir` itself. Throws
// when neither holds config.json and model.safetensors.
std::string newest_checkpoint(const std::string& dir);

// The only writer of an output directory. Opening one makes the directory, locks it against a second writer,
// and clears away what a killed one left. A directory made here is removed at the end if it is still empty,
// so that a run that is refused leaves nothing.
class CheckpointWriter {
 public:
  // A new run throws when `out` already holds a model, a resumed one when it holds none.
  CheckpointWriter(const std::string& out, bool resume);

  // Writes a checkpoint and makes it the newest; one of this step that is there already is left as it is.
  // Then removes all but the `keep` newest; 0 keeps all. On an error, as of a full disk, the checkpoints
  // before it stay, and nothing of the new one.
  void save(int64_t step, const std::vector<CheckpointFile>& files, int64_t keep);

 private:
  std::string inside(const std::string& name) const { return directory_.path() + "/" + name; }
  void clear_debris() const;
  void make_newest(const std::string& step_name) const;
  void link(const std::string& name, const std::string& to) const;
  void prune(int64_t keep) const;

  struct MadeDirectory {
    std::string path;
    bool made;
    explicit MadeDirectory(const std::string& out);
    ~MadeDirectory();
  } made_;
  File directory_;  // holds the lock
};

}  // namespace prism
