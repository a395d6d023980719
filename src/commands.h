// The subcommands of build/prism. Each adds itself, with its options and an example, to the command line.
#pragma once

#include <CLI/CLI.hpp>

namespace prism {

// Thrown by a command whose answer is its exit code, after it has printed what there is to say.
struct Exit {
  int code;
};

void add_train(CLI::App& app);
void add_generate(CLI::App& app);
void add_eval(CLI::App& app);
void add_tokenize(CLI::App& app);  // and tokenize train
void add_detokenize(CLI::App& app);
void add_init(CLI::App& app);
void add_inspect(CLI::App& app);
void add_grad(CLI::App& app);
void add_diff(CLI::App& app);
void add_gradcheck(CLI::App& app);
void add_bench(CLI::App& app);

}  // namespace prism
