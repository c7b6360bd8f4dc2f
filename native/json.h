// JSON, as much as a manifest and a safetensors header need. Whatever the text holds, it is refused with a sentence or
// read: no recursion past DEPTH, no exceptions past parse().
#ifndef STRATA_JSON_H
#define STRATA_JSON_H

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace strata {
struct Bad : std::runtime_error {  // what was given does not fit
  using std::runtime_error::runtime_error;
};

class Json {
 public:
  enum Kind { NOTHING, BOOLEAN, NUMBER, TEXT, LIST, OBJECT };

  static Json parse(const char* text, size_t size) {
    Reader reader{text, text + size};
    Json value = reader.value(0);
    reader.space();
    if (reader.at != reader.end) throw Bad("is not JSON: there is more after its end");
    return value;
  }

  Kind kind = NOTHING;
  const std::vector<Json>& list(const char* what) const { return need(LIST, what, "a list"), items; }
  const std::string& text(const char* what) const { return need(TEXT, what, "a text"), string; }
  double number(const char* what) const { return need(NUMBER, what, "a number"), real; }
  int64_t whole(const char* what, int64_t least, int64_t most) const {
    double found = number(what);
    if (!(found >= double(least) && found <= double(most)) || found != double(int64_t(found)))
      throw Bad(std::string(what) + " should be a whole number from " + std::to_string(least) + " to " + std::to_string(most));
    return int64_t(found);
  }
  bool is_nothing() const { return kind == NOTHING; }
  const Json* find(const std::string& key) const {
    for (auto& [name, value] : members)
      if (name == key) return &value;
    return nullptr;
  }
  const Json& at(const char* key) const {
    const Json* found = kind == OBJECT ? find(key) : nullptr;
    if (!found) throw Bad(std::string("has no ") + key);
    return *found;
  }
  const std::vector<std::pair<std::string, Json>>& entries() const { return members; }

 private:
  static constexpr int DEPTH = 32;
  double real = 0;
  std::string string;
  std::vector<Json> items;
  std::vector<std::pair<std::string, Json>> members;

  void need(Kind wanted, const char* what, const char* name) const {
    if (kind != wanted) throw Bad(std::string(what) + " should be " + name);
  }

  struct Reader {
    const char *at, *end;

    void space() {
      while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) ++at;
    }
    char peek() {
      space();
      if (at == end) throw Bad("is not JSON: it ends too early");
      return *at;
    }
    void take(char wanted) {
      if (peek() != wanted) throw Bad(std::string("is not JSON: there should be ") + wanted);
      ++at;
    }
    bool word(const char* wanted) {
      const char* from = at;
      while (*wanted && from < end && *from == *wanted) ++from, ++wanted;
      if (*wanted) return false;
      at = from;
      return true;
    }
    Json value(int depth) {
      if (depth > DEPTH) throw Bad("is nested too deeply");
      Json made;
      char first = peek();
      if (first == '{') {
        made.kind = OBJECT;
        ++at;
        for (bool more = peek() != '}'; more; more = separated('}')) {
          std::string key = quoted();
          take(':');
          made.members.emplace_back(std::move(key), value(depth + 1));
        }
        take('}');
      } else if (first == '[') {
        made.kind = LIST;
        ++at;
        for (bool more = peek() != ']'; more; more = separated(']')) made.items.push_back(value(depth + 1));
        take(']');
      } else if (first == '"') {
        made.kind = TEXT;
        made.string = quoted();
      } else if (word("true") || word("false")) {
        made.kind = BOOLEAN;
        made.real = at[-1] == 'e' && at[-2] == 'u';
      } else if (word("null")) {
      } else {
        made.kind = NUMBER;
        std::string digits;
        while (at < end && digits.size() < 40 && (*at == '-' || *at == '+' || *at == '.' || *at == 'e' || *at == 'E' || (*at >= '0' && *at <= '9')))
          digits += *at++;
        char* rest = nullptr;
        made.real = digits.empty() ? 0 : strtod(digits.c_str(), &rest);
        if (digits.empty() || *rest) throw Bad("is not JSON: a value is missing");
      }
      return made;
    }
    bool separated(char close) {
      if (peek() == close) return false;
      take(',');
      return true;
    }
    std::string quoted() {
      take('"');
      std::string made;
      while (at < end && *at != '"') {
        if (*at != '\\') {
          made += *at++;
          continue;
        }
        if (++at == end) break;
        char c = *at++;
        if (c == 'u') {
          if (end - at < 4) break;
          unsigned code = unsigned(strtoul(std::string(at, 4).c_str(), nullptr, 16));
          at += 4;
          if (code < 0x80) {
            made += char(code);
          } else if (code < 0x800) {
            made += char(0xc0 | code >> 6), made += char(0x80 | (code & 63));
          } else {
            made += char(0xe0 | code >> 12), made += char(0x80 | (code >> 6 & 63)), made += char(0x80 | (code & 63));
          }
        } else {
          made += c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c == 'b' ? '\b' : c == 'f' ? '\f' : c;
        }
      }
      if (at == end) throw Bad("is not JSON: a text does not end");
      ++at;
      return made;
    }
  };
};
}  // namespace strata
#endif
