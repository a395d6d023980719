// The command line: one subcommand a job. Errors are one line on stderr and nothing else there.
#include <cstdio>

#include "src/commands.h"
#include "tensor/check.h"

namespace {

int fail(const char* message, int code) {
  std::fprintf(stderr, "prism: %s\n", message);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"PRISM: train and study linear-recurrence language models, on the CPU or one NVIDIA GPU"};
  app.require_subcommand(1);
  app.footer(
      "Example: prism train --preset tiny --data src --out runs/first\nEach subcommand has --help with an "
      "example.");
  using namespace prism;
  for (const auto add :
       {add_train, add_generate, add_eval, add_tokenize, add_detokenize, add_init, add_inspect, add_report,
        add_probe, add_export, add_grad, add_diff, add_gradcheck, add_bench})
    add(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::Success& e) {  // --help
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    return fail(e.what(), 2);
  } catch (const Exit& e) {
    return e.code;
  } catch (const UsageError& e) {
    return fail(e.what(), 2);
  } catch (const std::exception& e) {
    return fail(e.what(), 1);
  }
}
