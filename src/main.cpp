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
  prism::add_train(app);
  prism::add_generate(app);
  prism::add_eval(app);
  prism::add_tokenize(app);
  prism::add_detokenize(app);
  prism::add_init(app);
  prism::add_inspect(app);
  prism::add_report(app);
  prism::add_probe(app);
  prism::add_export(app);
  prism::add_grad(app);
  prism::add_diff(app);
  prism::add_gradcheck(app);
  prism::add_bench(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::CallForHelp& e) {
    return app.exit(e);
  } catch (const CLI::CallForAllHelp& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    return fail(e.what(), 2);
  } catch (const prism::Exit& e) {
    return e.code;
  } catch (const prism::UsageError& e) {
    return fail(e.what(), 2);
  } catch (const std::exception& e) {
    return fail(e.what(), 1);
  }
}
