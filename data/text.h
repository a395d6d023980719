// Documents from files, also .zst: an object in .jsonl and .json is one, a plain text is one.
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
// The text with U+FFFD in the place of each byte that is not UTF-8.
std::string valid_utf8(std::string_view text);

// Throws when `head`, the first bytes of `path`, is a Git LFS pointer in place of the data.
void refuse_lfs_pointer(std::string_view head, const std::string& path);
// The file's content; throws with the path and the system's reason.
std::string read_file(const std::string& path);

// The files that the user named: a file itself, "-" (standard input), those that a glob matches, and those
// below a directory, sorted, without hidden ones and what doesn't look like text. Throws for a name that
// gives none.
std::vector<std::string> list_text_files(const std::vector<std::string>& names);

struct ReadOptions {
  std::string field = "text";  // path of a JSON document's text; "": all of it, as JSON
  std::string set_field = "meta.redpajama_set_name";  // and of its set's name
  bool json_files = true;  // .json holds documents; false: it is plain text, as in a source tree
  bool skip_bad = false;   // count documents that are not as expected, instead of throwing
  std::function<size_t(std::string_view)> cut;  // where a long plain text may be cut: Tokenizer::cut
};

struct Document {
  std::string text, set;   // set is empty when there is none
  bool continues = false;  // the next part of the document before, a long plain text
};

// Hands out the documents of files one after another. Memory holds one document, or of a plain text, which
// comes in parts, about 4 MiB. Throws, with file and line (.jsonl), number of the object (.json) or byte, for
// what cannot be read, is truncated or corrupt, is not JSON, lacks the field, or is not UTF-8.
class DocumentReader {
 public:
  DocumentReader(std::vector<std::string> files, ReadOptions options);
  ~DocumentReader();
  bool next(Document& document);
  int64_t skipped() const { return skipped_; }  // bad documents
  double fraction() const;                      // read of the files' bytes; 0 when their sizes are unknown

 private:
  struct Input;
  enum class Form { lines, objects, text };
  void open(const std::string& file);
  // Each returns false at the file's end; `problem` says what is wrong with a document.
  bool read_object(Document& document, std::string& problem);
  bool read_part(Document& document, std::string& problem);

  std::vector<std::string> files_;
  ReadOptions options_;
  size_t opened_ = 0;
  int64_t bytes_done_ = 0, bytes_total_ = 0, skipped_ = 0;
  // of the open file
  std::unique_ptr<Input> input_;
  Form form_ = Form::text;
  int64_t number_ = 0;  // line or object
  bool in_list_ = false;
  std::string text_;    // read, and not handed out
  int64_t offset_ = 0;  // of text_
};

}  // namespace prism
