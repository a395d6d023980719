#include "data/dataset.h"

#include <algorithm>
#include <cctype>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "tensor/rng.h"

namespace prism {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kBatchBytes = int64_t{256} << 10;    // of text that is encoded as one piece of work
constexpr int64_t kBytesInFlight = int64_t{32} << 20;  // of text read and not yet written

struct Counts {
  int64_t documents = 0, bytes = 0, tokens = 0;
  void add(const Document& d, int64_t ids) {
    documents += !d.continues, bytes += static_cast<int64_t>(d.text.size()), tokens += ids;
  }
  Json json() const { return {{"documents", documents}, {"bytes", bytes}, {"tokens", tokens}}; }
};

// The shards of train or val.
class Split {
 public:
  Split(std::string prefix, int width, int64_t shard_tokens)
      : prefix_(std::move(prefix)), width_(width), shard_tokens_(shard_tokens) {}
  void write(const Document& document, const int32_t* ids, int64_t n) {
    counts_.add(document, n);
    for (int64_t here; n > 0; ids += here, n -= here) {
      if (!shard_)
        shard_.emplace(cat(prefix_, std::setfill('0'), std::setw(6), shards_.size(), ".bin"), width_);
      here = std::min(n, shard_tokens_ - shard_->count());
      shard_->append(ids, here);
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
    shards_.push_back({{"file", fs::path(shard_->path()).filename()}, {"tokens", shard_->count()}});
    shard_.reset();
  }
  const std::string prefix_;
  const int width_;
  const int64_t shard_tokens_;
  std::optional<ShardWriter> shard_;
  Json shards_ = Json::array();
  Counts counts_;
};

// The work of tokenize(): threads that each read some documents, encode them, and write what has become
// writable in the order of reading.
class Job {
 public:
  Job(const TokenizeOptions& options, std::vector<std::string> files, std::string directory,
      const Report& report)
      : options_(options),
        report_(report),
        tokenizer_(Tokenizer::load(options.tokenizer)),
        width_(tokenizer_.vocab_size() <= 65536 ? 2 : 4),
        directory_(std::move(directory)),
        files_(std::move(files)),
        reader_(files_, with_cut(options.read)) {}

  TokenizeProgress run() {
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < options_.threads; ++i) threads.emplace_back([this] { work(); });
    }
    if (error_) std::rethrow_exception(error_);
    PRISM_CHECK(total_.tokens > 0, "tokenize: no tokens in ", files_.size(), " files, the first ", files_[0],
                options_.sets.empty() ? "" : cat("; expected documents of the set ", options_.sets[0]));
    tokenizer_.save_into(directory_);
    const std::string path = directory_ + "/dataset.json";
    std::ofstream out(path);
    PRISM_CHECK((out << describe().dump(2) << "\n").flush(), path, ": cannot write it");
    return progress();
  }

 private:
  struct Batch {
    std::vector<Document> documents;
    std::vector<int32_t> ids;     // of all documents
    std::vector<int64_t> counts;  // of each document's ids
    int64_t bytes = 0;            // of the documents in memory
    int64_t skipped = 0;          // bad documents, up to the last one here
    std::exception_ptr error;     // that came after them
  };

  ReadOptions with_cut(ReadOptions read) const {
    read.cut = [this](std::string_view text) { return tokenizer_.cut(text); };
    return read;
  }

  void work() try {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return finished_ || in_flight_ < kBytesInFlight; });
      if (finished_) return;
      const int64_t ticket = next_read_++;
      Batch batch = read();
      lock.unlock();
      for (const Document& document : batch.documents) encode(document, batch);
      lock.lock();
      read_.emplace(ticket, std::move(batch));
      for (auto it = read_.begin(); it != read_.end() && it->first == next_write_ && !stopped_;
           ++next_write_) {
        write(it->second);
        in_flight_ -= it->second.bytes;
        it = read_.erase(it);
      }
      if (report_ && !stopped_) report_(progress());
      changed_.notify_all();
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
    finished_ = stopped_ = true;
    changed_.notify_all();
  }

  Batch read() {
    Batch batch;
    try {
      for (Document document; batch.bytes < kBatchBytes && reader_.next(document);) {
        batch.bytes += static_cast<int64_t>(document.text.size() + sizeof document);
        batch.documents.push_back(std::move(document));
      }
    } catch (...) {
      batch.error = std::current_exception();
    }
    finished_ = finished_ || batch.error || batch.bytes < kBatchBytes;
    batch.skipped = reader_.skipped();
    in_flight_ += batch.bytes;
    return batch;
  }

  void encode(const Document& document, Batch& batch) const {
    const size_t before = batch.ids.size();
    if (!document.continues && !document.text.empty()) batch.ids.push_back(tokenizer_.bos());
    tokenizer_.encode(document.text, batch.ids, document.continues);
    batch.counts.push_back(static_cast<int64_t>(batch.ids.size() - before));
  }

  void write(const Batch& batch) {
    const int32_t* ids = batch.ids.data();
    for (size_t i = 0; i < batch.documents.size() && !stopped_; ++i) {
      const Document& document = batch.documents[i];
      if (!document.continues) {  // the parts of a document go where its first one went
        to_val_ = random_uniform(fnv1a(document.text), 0, 0) < options_.val_fraction;
        wanted_ =
            options_.sets.empty() || std::count(options_.sets.begin(), options_.sets.end(), document.set);
      }
      if (wanted_) {
        empty_ += document.text.empty() && !document.continues;
        total_.add(document, batch.counts[i]);
        sets_[document.set].add(document, batch.counts[i]);
        (to_val_ ? val_ : train_).write(document, ids, batch.counts[i]);
      }
      ids += batch.counts[i];
      if (total_.tokens >= options_.limit_tokens) finished_ = stopped_ = true;
    }
    skipped_ = batch.skipped;
    if (batch.error && !stopped_) std::rethrow_exception(batch.error);
  }

  TokenizeProgress progress() const {
    return {reader_.fraction(), total_.bytes, total_.documents, total_.tokens, empty_, skipped_};
  }

  Json describe() {
    Json json = {{"format", "prism dataset 1"},
                 {"tokenizer", {{"file", tokenizer_.file()}, {"hash", tokenizer_.hash()}}},
                 {"vocab_size", tokenizer_.vocab_size()},
                 {"bos_token_id", tokenizer_.bos()},
                 {"eos_token_id", tokenizer_.eos()},
                 {"bytes_per_id", width_}};
    json.update(total_.json());
    json["empty_documents"] = empty_;
    json["skipped_documents"] = skipped_;
    json["splits"] = {{"train", train_.finish()}, {"val", val_.finish()}};
    for (const auto& [set, counts] : sets_) json["sets"][set] = counts.json();
    json["command"] = options_.command;
    json["sources"] = files_;
    return json;
  }

  const TokenizeOptions& options_;
  const Report& report_;
  const Tokenizer tokenizer_;
  const int width_;  // bytes an id
  const std::string directory_;
  const std::vector<std::string> files_;

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  DocumentReader reader_;
  int64_t next_read_ = 0, next_write_ = 0, in_flight_ = 0;
  std::map<int64_t, Batch> read_;  // and encoded, by order of reading
  bool finished_ = false;          // nothing more is read
  bool stopped_ = false;           // nothing more is written
  std::exception_ptr error_;

  Split train_{directory_ + "/train_", width_, options_.shard_tokens};
  Split val_{directory_ + "/val_", width_, options_.shard_tokens};
  Counts total_;
  std::map<std::string, Counts> sets_;
  int64_t empty_ = 0, skipped_ = 0;
  bool to_val_ = false, wanted_ = true;
};

int64_t integer(const Json& object, const char* key, const std::string& directory) {
  const Json& value = object.at(key);
  PRISM_CHECK(value.is_number_integer(), directory, "/dataset.json: ", key, ": expected an integer, got a ",
              value.is_number() ? "fraction" : value.type_name());
  return value.get<int64_t>();
}

TokenStream open_split(const Json& split, const std::string& directory, int64_t width) {
  TokenStream stream;
  for (const Json& shard : split.at("shards")) {
    const auto name = shard.at("file").get<std::string>();
    const auto foreign = [](unsigned char c) { return c == '/' || std::iscntrl(c); };
    PRISM_CHECK(!name.empty() && std::none_of(name.begin(), name.end(), foreign), directory,
                "/dataset.json: expected the name of a file beside it, got ", shard.at("file"));
    const std::string path = directory + "/" + name;
    const int64_t count = integer(shard, "tokens", directory);
    const TokenSpan span = open_shard(path);
    PRISM_CHECK(span.count == count && span.width == width, path, ": dataset.json says ", count, " ids of ",
                width, " bytes, got ", span.count, " of ", span.width);
    stream.append(span);
  }
  return stream;
}

}  // namespace

TokenizeProgress tokenize(const TokenizeOptions& options, const Report& report) {
  PRISM_CHECK(options.shard_tokens >= 1 && options.shard_tokens <= INT32_MAX,
              "tokenize: expected 1 to 2147483647 tokens a shard, got ", options.shard_tokens);
  PRISM_CHECK(options.threads >= 1, "tokenize: expected at least 1 thread, got ", options.threads);
  std::vector<std::string> files = list_text_files(options.inputs);
  PRISM_CHECK(!files.empty(), "tokenize: no input");
  PRISM_CHECK(!fs::exists(options.out) || (fs::is_directory(options.out) && fs::is_empty(options.out)),
              options.out, ": expected a directory that is empty or does not exist yet");
  fs::path out = fs::absolute(options.out).lexically_normal();
  if (!out.has_filename()) out = out.parent_path();  // "sets/", whose neighbour would lie within
  const std::string partial = out.string() + ".partial";
  fs::remove_all(partial);
  fs::create_directories(partial);
  try {
    const TokenizeProgress done = Job(options, std::move(files), partial, report).run();
    fs::rename(partial, out);
    return done;
  } catch (...) {
    fs::remove_all(partial);
    throw;
  }
}

bool is_dataset(const std::string& path) { return fs::exists(path + "/dataset.json"); }

Dataset open_dataset(const std::string& directory) try {
  const Json json = Json::parse(read_file(directory + "/dataset.json"));
  Dataset data{Tokenizer::load(directory), {}, {}};
  const auto hash = json.at("tokenizer").at("hash").get<std::string>();
  PRISM_CHECK(data.tokenizer.hash() == hash, directory, "/", data.tokenizer.file(),
              ": dataset.json says its hash is ", json["tokenizer"]["hash"], ", got ", data.tokenizer.hash());
  const int64_t width = integer(json, "bytes_per_id", directory);
  data.train = open_split(json.at("splits").at("train"), directory, width);
  data.val = open_split(json.at("splits").at("val"), directory, width);
  return data;
} catch (const nlohmann::json::exception& error) {
  PRISM_FAIL(directory, "/dataset.json: not a data set's description: ", error.what());
}

}  // namespace prism
