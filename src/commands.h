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
// gradcheck [--device cpu|cuda] [--dtype f64|f32|bf16] [--inject-error E] [--filter TEXT]
void add_gradcheck(CLI::App& app);

}  // namespace prism
