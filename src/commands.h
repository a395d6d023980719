// The subcommands of build/prism. Each adds itself, with its options and an example, to the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <limits>

namespace prism {

// Thrown by a command whose answer is its exit code, after it has printed what there is to say.
struct Exit {
  int code;
};

// What an option takes: a finite number above 0, or 0 too. CLI11's own message prints the largest double.
inline CLI::Validator number_above_zero(bool or_zero) {
  const auto check = [or_zero](const std::string& text) {
    double x;
    const bool good = CLI::detail::lexical_cast(text, x) && (or_zero ? x >= 0 : x > 0) &&
                      x <= std::numeric_limits<double>::max();
    return good ? "" : (or_zero ? "expected 0 or more, got " : "expected more than 0, got ") + text;
  };
  return {check, or_zero ? "0 or more" : "above 0"};
}

void add_train(CLI::App& app);
void add_generate(CLI::App& app);
void add_eval(CLI::App& app);
void add_tokenize(CLI::App& app);  // and tokenize train
void add_detokenize(CLI::App& app);
void add_init(CLI::App& app);
void add_inspect(CLI::App& app);
void add_report(CLI::App& app);
void add_probe(CLI::App& app);
void add_export(CLI::App& app);
void add_grad(CLI::App& app);
void add_diff(CLI::App& app);
void add_gradcheck(CLI::App& app);
void add_bench(CLI::App& app);

}  // namespace prism
