// The subcommands of build/prism. Each adds itself, with its options and an example, to the command line.
#pragma once

#include <CLI/CLI.hpp>

namespace prism {

// Thrown by a command whose answer is its exit code, after it has printed what there is to say.
struct Exit {
  int code;
};

// diff A.safetensors B.safetensors [--tolerance E]
void add_diff(CLI::App& app);

// init (--config FILE | --preset NAME) --seed N --out DIR
void add_init(CLI::App& app);
// inspect --model DIR
void add_inspect(CLI::App& app);
// grad --model DIR --tokens SHARD --batch B --seq T --out FILE.safetensors
void add_grad(CLI::App& app);
// generate --model DIR --prompt TEXT --tokens N
void add_generate(CLI::App& app);
// eval --model DIR --data PATH...
void add_eval(CLI::App& app);

}  // namespace prism
