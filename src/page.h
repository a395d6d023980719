// Self-contained HTML pages: src/page.html, which draws the JSON that is put into it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace prism {

// {"name", "inspect": of inspect_writes()} or {"runs": of describe_run()}. Strings may hold anything.
void write_page(const std::string& path, const nlohmann::ordered_json& data);

}  // namespace prism
