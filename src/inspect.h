// Do the L writes do different things? Numbers from the values that a forward pass computes on its way.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "data/tokenizer.h"
#include "src/engine.h"

namespace prism {

struct InspectOptions {
  int64_t rows = 4, seq = 512;  // the data's first windows; fewer, or shorter, when it has less
  int64_t token = -1;           // one position of theirs to be walked through, counted from 0; -1: none
};

// {"rows", "seq", "rank", "layers": one object for each layer with a scan, "token": when asked for};
// inspect.cpp says, where it computes a number, what it is. The tokenizer, when given, names the token.
nlohmann::ordered_json inspect_writes(Model& model, const TokenStream& stream, const Tokenizer* tokenizer,
                                      const InspectOptions& options);
// The same for the paths that --data names, read by the tokenizer of the model in `dir`.
nlohmann::ordered_json inspect_data(Model& model, const std::string& dir,
                                    const std::vector<std::string>& data, const InspectOptions& options);

}  // namespace prism
