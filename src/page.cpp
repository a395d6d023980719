#include "src/page.h"

#include <nlohmann/json.hpp>

#include "src/files.h"

namespace prism {

namespace {

constexpr std::string_view kPage =
#include "src/page.html"
    ;
constexpr std::string_view kPlace = "@DATA@</script>";

}  // namespace

void write_page(const std::string& path, const nlohmann::ordered_json& data) {
  using Json = nlohmann::ordered_json;
  const size_t at = kPage.find(kPlace);
  std::string text;
  // As JSON of ASCII without "<": no string can end the script element, or open a comment in it.
  for (char c : data.dump(-1, ' ', true, Json::error_handler_t::replace))
    c == '<' ? text += "\\u003c" : text += c;
  replace_file(path, [&](OutputFile& file) {
    file.write(kPage.substr(0, at));
    file.write(text);
    file.write(kPage.substr(at + std::string_view("@DATA@").size()));
  });
}

}  // namespace prism
