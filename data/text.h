// Documents from files: .jsonl and .json (an object is a document) and plain text (a file is one), also as
// .zst.
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

// Throws when `head`, the first bytes of `path`, is a Git LFS pointer in place of the data.
void refuse_lfs_pointer(std::string_view head, const std::string& path);
// The file's content; throws with the path and the system's reason.
std::string read_file(const std::string& path);

// The files that the user named: a file itself, "-" (standard input), what a glob matches, and the files
// below a directory, sorted, without hidden ones and those that don't look like text. Throws for a name that
// gives none.
std::vector<std::string> list_text_files(const std::vector<std::string>& names);

struct ReadOptions {
  std::string field = "text";                         // path of a JSON document's text
  std::string set_field = "meta.redpajama_set_name";  // and of its set's name
  bool json_files = true;  // .json holds documents; false: it is plain text, as in a source tree
  bool skip_bad = false;   // count documents that are not as expected, instead of throwing
  std::function<size_t(std::string_view)> cut;  // where a long plain text may be cut: Tokenizer::cut
};

struct Document {
  std::string text, set;   // set is empty when there is none
  bool continues = false;  // the next part of the document before, a long plain text
};

// Hands out the documents of files one after another. Memory is bounded for any file size: a JSON object may
// have 32 MiB, a plain text comes in parts of about 4 MiB. Throws, with file and line or byte, for what
// cannot be read, is truncated or corrupt, and for a document that is not JSON, lacks the field, or is not
// UTF-8.
class DocumentReader {
 public:
  DocumentReader(std::vector<std::string> files, ReadOptions options);
  ~DocumentReader();
  bool next(Document& document);
  int64_t skipped() const { return skipped_; }  // bad documents
  double fraction() const;                      // read of the files' bytes; 0 when their sizes are unknown

 private:
  class Bytes;  // the open file, decompressed
  enum class Form { lines, objects, text };

  void open(const std::string& file);
  bool fill();
  size_t next_line();
  size_t next_object();
  size_t next_part();
  void parse(std::string_view record, Document& document) const;

  std::vector<std::string> files_;
  ReadOptions options_;
  size_t opened_ = 0;
  int64_t bytes_done_ = 0, bytes_total_ = 0, skipped_ = 0;
  // of the open file
  std::unique_ptr<Bytes> bytes_;
  std::string path_, buffer_;  // what is read and not yet handed out: buffer_[at_, end)
  size_t at_ = 0;
  int64_t offset_ = 0, line_ = 0;  // of buffer_[at_]
  Form form_ = Form::text;
  bool ended_ = false, in_list_ = false, continues_ = false;
};

}  // namespace prism
