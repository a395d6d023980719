#include "data/dataset.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "tensor/rng.h"

namespace prism {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kBatchBytes = int64_t{256} << 10;    // read for one piece of work
constexpr int64_t kBytesInFlight = int64_t{32} << 20;  // read and not written yet

struct Work {
  std::vector<Record> records;
  int64_t bytes = 0;
  std::exception_ptr error;  // reading ended with it, after the records
};

struct EncodedDocument {
  std::string set;
  int64_t bytes = 0, ids = 0;
  bool val = false, continues = false, bad = false;
};

struct Encoded {
  std::vector<EncodedDocument> documents;
  std::vector<int32_t> ids;  // of all of them
  int64_t bytes = 0;         // of the work
  std::exception_ptr error;
};

Encoded encode(Work&& work, const TokenizeOptions& options, const Tokenizer& tokenizer) {
  Encoded out;
  out.bytes = work.bytes;
  const auto encode_one = [&](Record& record) {
    EncodedDocument& result = out.documents.emplace_back();
    result.continues = record.continues;
    try {
      const Document document = parse_record(std::move(record), options.read);
      const auto before = out.ids.size();
      result.set = document.set;
      result.bytes = static_cast<int64_t>(document.text.size());
      result.val = random_uniform(fnv1a(document.text), 0, 0) < options.val_fraction;
      if (document.text.empty()) return;
      if (!result.continues) out.ids.push_back(tokenizer.bos());
      tokenizer.encode(document.text, out.ids, result.continues);
      result.ids = static_cast<int64_t>(out.ids.size() - before);
    } catch (const Error&) {
      if (!options.skip_bad) throw;
      result.bad = true;
    }
  };
  try {
    for (Record& record : work.records) encode_one(record);
    if (work.error) std::rethrow_exception(work.error);
  } catch (...) {
    out.error = std::current_exception();
  }
  return out;
}

struct Counts {
  int64_t documents = 0, bytes = 0, tokens = 0;
  void add(const EncodedDocument& d) { documents += !d.continues, bytes += d.bytes, tokens += d.ids; }
  Json json() const { return {{"documents", documents}, {"bytes", bytes}, {"tokens", tokens}}; }
};

// The shards of one split.
class Split {
 public:
  Split(std::string prefix, int width, int64_t shard_tokens)
      : prefix_(std::move(prefix)), width_(width), shard_tokens_(shard_tokens) {}
  void write(const EncodedDocument& document, const int32_t* ids) {
    counts_.add(document);
    for (int64_t left = document.ids; left > 0;) {
      if (!shard_) {
        char number[16];
        std::snprintf(number, sizeof number, "_%06zu.bin", shards_.size());
        shards_.push_back({{"file", fs::path(prefix_ + number).filename()}});
        shard_.emplace(prefix_ + number, width_);
      }
      const int64_t n = std::min(left, shard_tokens_ - shard_->count());
      shard_->append(ids, n);
      ids += n, left -= n;
      if (shard_->count() == shard_tokens_) finish_shard();
    }
  }
  Json finish() {
    if (shard_) finish_shard();
    Json json = counts_.json();
    json["shards"] = shards_;
    return json;
  }

 private:
  void finish_shard() {
    shard_->finish();
    shards_.back()["tokens"] = shard_->count();
    shard_.reset();
  }
  std::string prefix_;
  int width_;
  int64_t shard_tokens_;
  std::optional<ShardWriter> shard_;
  Json shards_ = Json::array();
  Counts counts_;
};

class DatasetWriter {
 public:
  DatasetWriter(const TokenizeOptions& options, const Tokenizer& tokenizer, const std::string& directory)
      : options_(options),
        width_(tokenizer.vocab_size() <= 65536 ? 2 : 4),
        train_(directory + "/train", width_, options.shard_tokens),
        val_(directory + "/val", width_, options.shard_tokens) {}

  // False when the limit of tokens is reached.
  bool write(const Encoded& batch) {
    const int32_t* ids = batch.ids.data();
    for (const EncodedDocument& document : batch.documents) {
      if (!document.continues) {  // the parts of a document go where its first one went
        to_val_ = document.val;
        wanted_ = options_.sets.empty() ||
                  std::find(options_.sets.begin(), options_.sets.end(), document.set) != options_.sets.end();
        if (!document.bad) ++seen_sets_[document.set];
      }
      progress.skipped += document.bad;
      if (!document.bad && wanted_) {
        progress.empty += document.bytes == 0 && !document.continues;
        total_.add(document);
        sets_[document.set].add(document);
        (to_val_ ? val_ : train_).write(document, ids);
      }
      ids += document.ids;
      if (total_.tokens >= options_.limit_tokens) return false;
    }
    progress.bytes = total_.bytes, progress.documents = total_.documents, progress.tokens = total_.tokens;
    return true;
  }

  Json finish(const Tokenizer& tokenizer, const std::vector<std::string>& files) {
    if (total_.tokens == 0) {
      std::string seen;
      for (const auto& [set, documents] : seen_sets_) seen += cat(" \"", set, "\" (", documents, ")");
      PRISM_FAIL("tokenize: no tokens in ", files.size(), " files, first ", files[0],
                 "; documents by set:", seen.empty() ? " none" : seen);
    }
    progress.bytes = total_.bytes, progress.documents = total_.documents, progress.tokens = total_.tokens;
    Json json = {
        {"format", "prism dataset 1"},
        {"tokenizer", {{"file", tokenizer.file()}, {"name", tokenizer.name()}, {"hash", tokenizer.hash()}}},
        {"vocab_size", tokenizer.vocab_size()},
        {"bos_token_id", tokenizer.bos()},
        {"eos_token_id", tokenizer.eos()},
        {"bytes_per_id", width_}};
    json.update(total_.json());
    json["empty_documents"] = progress.empty;
    json["skipped_documents"] = progress.skipped;
    json["val_fraction"] = options_.val_fraction;
    json["splits"] = {{"train", train_.finish()}, {"val", val_.finish()}};
    for (const auto& [set, counts] : sets_) json["sets"][set] = counts.json();
    json["command"] = options_.command;
    json["sources"] = files;
    return json;
  }

  TokenizeProgress progress;

 private:
  const TokenizeOptions& options_;
  int width_;
  Split train_, val_;
  Counts total_;
  std::map<std::string, Counts> sets_;
  std::map<std::string, int64_t> seen_sets_;
  bool to_val_ = false, wanted_ = true;
};

// Threads that each read the next work, encode it, and write what has become writable, in reading order.
class Pipeline {
 public:
  using Report = std::function<void(const TokenizeProgress&)>;
  Pipeline(RecordReader& reader, DatasetWriter& writer, const TokenizeOptions& options,
           const Tokenizer& tokenizer, const Report& report)
      : reader_(reader), writer_(writer), options_(options), tokenizer_(tokenizer), report_(report) {}

  void run() {
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < options_.threads; ++i) threads.emplace_back([this] { work(); });
    }
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return finished_ || in_flight_ < kBytesInFlight; });
      if (finished_) return;
      const int64_t ticket = next_read_++;
      Work todo = read();
      in_flight_ += todo.bytes;
      lock.unlock();
      Encoded result = encode(std::move(todo), options_, tokenizer_);
      lock.lock();
      done_.emplace(ticket, std::move(result));
      write_in_order();
      changed_.notify_all();
    }
  }

  Work read() {
    Work work;
    try {
      while (work.bytes < kBatchBytes && !finished_) {
        Record record;
        if (!reader_.next(record)) {
          finished_ = true;
          break;
        }
        work.bytes += static_cast<int64_t>(record.bytes.size());
        work.records.push_back(std::move(record));
      }
    } catch (...) {
      work.error = std::current_exception();
      finished_ = true;
    }
    return work;
  }

  void write_in_order() {
    for (auto it = done_.find(next_write_); it != done_.end() && !stopped_; it = done_.find(next_write_)) {
      try {
        if (it->second.error) std::rethrow_exception(it->second.error);
        stopped_ = !writer_.write(it->second);
      } catch (...) {
        error_ = std::current_exception();
        stopped_ = true;
      }
      finished_ = finished_ || stopped_;
      in_flight_ -= it->second.bytes;
      done_.erase(it);
      ++next_write_;
    }
    const int64_t total = reader_.bytes_total();
    writer_.progress.fraction =
        total > 0 ? static_cast<double>(reader_.bytes_read()) / static_cast<double>(total) : 0;
    if (report_ && !stopped_) report_(writer_.progress);
  }

  RecordReader& reader_;
  DatasetWriter& writer_;
  const TokenizeOptions& options_;
  const Tokenizer& tokenizer_;
  const Report& report_;

  std::mutex mutex_;  // of all below, the reader and the writer
  std::condition_variable changed_;
  int64_t next_read_ = 0, next_write_ = 0, in_flight_ = 0;
  std::map<int64_t, Encoded> done_;
  bool finished_ = false;  // nothing more is read
  bool stopped_ = false;   // nothing more is written
  std::exception_ptr error_;
};

// A directory that is removed unless it is renamed first.
class PartialDirectory {
 public:
  explicit PartialDirectory(const std::string& final) : path(final + ".partial"), final_(final) {
    PRISM_CHECK(!fs::exists(final) || (fs::is_directory(final) && fs::is_empty(final)), final,
                ": expected a directory that is empty or does not exist yet");
    fs::remove_all(path);
    fs::create_directories(path);
  }
  ~PartialDirectory() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  void commit() { fs::rename(path, final_); }
  const std::string path;

 private:
  std::string final_;
};

TokenStream open_split(const Json& split, const std::string& directory, int width) {
  TokenStream stream;
  for (const Json& shard : split.at("shards")) {
    const std::string path = fs::path(directory) / shard.at("file").get<std::string>();
    const auto count = shard.at("tokens").get<int64_t>();
    const TokenSpan span = open_shard(path);
    PRISM_CHECK(span.count == count && span.width == width, path, ": dataset.json says ", count, " ids of ",
                width, " bytes, got ", span.count, " of ", span.width);
    stream.append(span);
  }
  return stream;
}

}  // namespace

TokenizeProgress tokenize(const TokenizeOptions& options,
                          const std::function<void(const TokenizeProgress&)>& report) {
  PRISM_CHECK(options.shard_tokens >= 1 && options.shard_tokens <= INT32_MAX,
              "tokenize: expected 1 to 2147483647 tokens a shard, got ", options.shard_tokens);
  PRISM_CHECK(options.threads >= 1, "tokenize: expected at least 1 thread, got ", options.threads);
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  const std::vector<std::string> files = list_text_files(options.inputs);
  PRISM_CHECK(!files.empty(), "tokenize: no input");
  TokenizeOptions with_cut = options;
  with_cut.read.cut = [&](std::string_view text) { return tokenizer.cut(text); };

  PartialDirectory directory(options.out);
  RecordReader reader(files, with_cut.read);
  DatasetWriter writer(with_cut, tokenizer, directory.path);
  Pipeline(reader, writer, with_cut, tokenizer, report).run();
  const Json json = writer.finish(tokenizer, files);
  tokenizer.save_into(directory.path);
  const std::string path = directory.path + "/dataset.json";
  std::ofstream out(path);
  out << json.dump(2) << "\n";
  PRISM_CHECK(out.flush(), path, ": cannot write it");
  directory.commit();
  return writer.progress;
}

bool is_dataset(const std::string& path) { return fs::exists(fs::path(path) / "dataset.json"); }

Dataset open_dataset(const std::string& directory) {
  const std::string path = fs::path(directory) / "dataset.json";
  try {
    const Json json = Json::parse(read_file(path));
    Dataset data{Tokenizer::load(directory), {}, {}};
    const auto hash = json.at("tokenizer").at("hash").get<std::string>();
    PRISM_CHECK(data.tokenizer.hash() == hash, directory, "/", data.tokenizer.file(),
                ": dataset.json says its hash is ", hash, ", got ", data.tokenizer.hash());
    const int width = json.at("bytes_per_id").get<int>();
    data.train = open_split(json.at("splits").at("train"), directory, width);
    data.val = open_split(json.at("splits").at("val"), directory, width);
    return data;
  } catch (const nlohmann::json::exception& error) {
    PRISM_FAIL(path, ": not a data set's description: ", error.what());
  }
}

}  // namespace prism
