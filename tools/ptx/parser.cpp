#include "parser.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <sstream>

namespace ptx {
namespace {

std::string trimmed(const std::string& s) {
  const size_t begin = s.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return "";
  return s.substr(begin, s.find_last_not_of(" \t\r") - begin + 1);
}

std::vector<std::string> words(const std::string& s) {
  std::istringstream in(s);
  std::vector<std::string> found;
  for (std::string word; in >> word;) found.push_back(word);
  return found;
}

std::string without_spaces(std::string s) {
  std::erase_if(s, [](char c) { return c == ' ' || c == '\t'; });
  return s;
}

// Splits at commas that are not inside brackets.
std::vector<std::string> split(const std::string& s) {
  std::vector<std::string> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= s.size(); ++i) {
    if (i == s.size() ? !s.empty() : s[i] == ',' && depth == 0) {
      parts.push_back(without_spaces(s.substr(begin, i - begin)));
      begin = i + 1;
    } else if (i < s.size()) {
      depth += (s[i] == '[' || s[i] == '{') - (s[i] == ']' || s[i] == '}');
    }
  }
  return parts;
}

// ".param .align 8 .b8 name[64]" or ".shared .align 4 .u32 name" or ".param .u64 .ptr name"
Variable variable(const std::string& declaration) {
  Variable result;
  int64_t element = 0;
  static const std::set<std::string> kNoTypes = {".param",   ".shared", ".extern",
                                                 ".visible", ".ptr",    ".global"};
  const std::vector<std::string> all = words(declaration);
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] == ".align") {
      result.alignment = std::atoll(all[++i].c_str());
    } else if (all[i][0] == '.') {
      if (!kNoTypes.contains(all[i])) element = bytes_of_type(all[i].substr(1));
    } else {
      const size_t bracket = all[i].find('[');
      result.name = all[i].substr(0, bracket);
      const int64_t count =
          bracket == std::string::npos ? 1 : std::atoll(all[i].c_str() + bracket + 1);
      result.bytes = element * count;
    }
  }
  result.alignment = std::max(result.alignment, element);
  return result;
}

// ".reg .b32 %r<404>": %r0 to %r403; ".reg .b64 %SP"
void declare_registers(Entry& entry, const std::string& declaration) {
  const std::vector<std::string> all = words(declaration);
  if (all.size() != 3) throw Error("unknown declaration of registers");
  const size_t bracket = all[2].find('<');
  const int count = bracket == std::string::npos ? 0 : std::atoi(all[2].c_str() + bracket + 1);
  const std::string type = all[1].substr(1);
  entry.registers[all[2].substr(0, bracket)] = {type == "pred" ? 1 : bytes_of_type(type), count};
}

Statement statement(const std::string& text, int line) {
  Statement result = {line, text, "", "", {}};
  std::string rest = text;
  if (rest[0] == '@') {
    const size_t end = rest.find_first_of(" \t");
    result.guard = rest.substr(1, end - 1);
    rest = trimmed(rest.substr(end));
  }
  const size_t end = rest.find_first_of(" \t");
  result.opcode = rest.substr(0, end);
  if (end != std::string::npos) result.operands = split(trimmed(rest.substr(end)));
  return result;
}

class Parser {
 public:
  Module parse(const std::string& text) {
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
      ++number_;
      line = trimmed(line.substr(0, line.find("//")));
      if (line.empty()) continue;
      if (line.starts_with(".section")) break;  // debug information comes last
      try {
        read(line);
      } catch (const Error& error) {
        throw Error("PTX line " + std::to_string(number_) + ": " + error.what() + ": " + line);
      }
    }
    return module_;
  }

 private:
  void read(std::string line) {
    if (line.find(".entry") != std::string::npos) {
      const size_t begin = line.find(".entry") + 7;
      std::string name = trimmed(line.substr(begin, line.find('(') - begin));
      entry_ = &module_.entries[name];
      entry_->name = name;
      return;
    }
    // Ignore the braces of inline assembly, whose registers are not used outside them.
    if (line.size() > 1 && line[0] == '{') line = trimmed(line.substr(1));
    if (line.size() > 1 && line.back() == '}') line = trimmed(line.substr(0, line.size() - 1));
    if (line == "{" || line == "}" || line == ")") {
      if (line == "}") entry_ = nullptr;
      return;
    }
    if (entry_ != nullptr && line.starts_with(".param")) {
      if (line.back() == ',') line.pop_back();
      entry_->parameters.push_back(variable(line));
      return;
    }
    static const std::set<std::string> kIgnored = {".version", ".target",  ".address_size",
                                                   ".maxntid", ".reqntid", ".minnctapersm",
                                                   ".pragma",  ".loc",     ".file"};
    if (kIgnored.contains(words(line)[0])) return;
    if (line.back() == ':') {
      entry_->labels[line.substr(0, line.size() - 1)] = static_cast<int>(entry_->body.size());
      return;
    }
    if (line.back() != ';') throw Error("a statement must be one line");
    line.pop_back();
    if (line.find(".shared") != std::string::npos && line[0] == '.') {
      (entry_ != nullptr ? entry_->shared : module_.shared).push_back(variable(line));
    } else if (line.starts_with(".reg")) {
      declare_registers(*entry_, line);
    } else if (entry_ == nullptr || line[0] == '.') {
      throw Error("unknown directive");
    } else {
      entry_->body.push_back(statement(trimmed(line), number_));
    }
  }

  Module module_;
  Entry* entry_ = nullptr;
  int number_ = 0;
};

}  // namespace

Module parse(const std::string& text) { return Parser().parse(text); }

int bytes_of_type(const std::string& type) {
  const int bits = type.empty() ? 0 : std::atoi(type.c_str() + 1);
  if (bits != 8 && bits != 16 && bits != 32 && bits != 64) throw Error("unknown type ." + type);
  return bits / 8;
}

}  // namespace ptx
