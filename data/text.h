// Reading documents from files: .jsonl and .json (one object a document), .zst of either or of text, plain
// text.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace prism {

// 64-bit FNV-1a, to tell files and texts apart.
uint64_t fnv1a(std::string_view bytes);
// Bytes at the end of `text` that begin a UTF-8 character and don't finish it: 0 to 3.
size_t incomplete_tail(std::string_view text);
// Position of the first byte that is not UTF-8, an unfinished last character included; npos when all is.
size_t find_invalid_utf8(std::string_view text);

// The file's content; throws with the path and the system's reason.
std::string read_file(const std::string& path);
// Throws when `head`, the first bytes of `path`, is a Git LFS pointer in place of the data.
void refuse_lfs_pointer(std::string_view head, const std::string& path);

// Files for what the user named, in order: a file itself, "-" (standard input), what a glob matches, and a
// directory's files below it, sorted; hidden files and those that don't look like text are skipped there.
// Throws for a name that gives nothing.
std::vector<std::string> list_text_files(const std::vector<std::string>& names);

struct ReadOptions {
  std::string field = "text";  // the key of a document's text
  std::string set_field = "meta.redpajama_set_name";
  bool json_files = true;  // .json holds documents; false: it is plain text, as in a source tree
  // Where a long plain text may be cut (Tokenizer::cut).
  std::function<size_t(std::string_view)> cut;
};

// One document as it stands in its file, or one part of a long plain text.
struct Record {
  std::string bytes;
  std::shared_ptr<const std::string> file;
  int64_t place = 0;       // line in .jsonl, byte offset (of the decompressed text) otherwise
  bool json = false;       // bytes are a JSON object, else the text itself
  bool by_line = false;    // place is a line
  bool continues = false;  // follows the record before, of the same document
  std::string where() const;
};

// Hands out the records of files one after another; memory stays bounded for any file size: a JSON object may
// have 64 MiB, a plain text is cut into parts of about 4 MiB. Throws for unreadable, truncated or corrupt
// input.
class RecordReader {
 public:
  RecordReader(std::vector<std::string> files, ReadOptions options);
  ~RecordReader();
  bool next(Record& record);
  // Bytes read from the files so far, as they lie on disk, and their sizes together (0: unknown).
  int64_t bytes_read() const;
  int64_t bytes_total() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct Document {
  std::string text;
  std::string set;  // the value of set_field; empty when absent
};

// Throws with file and line or offset when the record is not JSON, the field is missing or no string, or the
// text is not UTF-8. May be called from many threads at once.
Document parse_record(Record&& record, const ReadOptions& options);

}  // namespace prism
