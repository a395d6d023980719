// The subcommands of `prism`; each adds itself to the application, with its options, help and callback.
#pragma once

namespace CLI {
class App;
}

namespace prism {

void add_tokenize(CLI::App& app);    // tokenize, tokenize train
void add_detokenize(CLI::App& app);  // detokenize

}  // namespace prism
