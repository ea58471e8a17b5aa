#include "weights/json.h"

#include <algorithm>

namespace kt {

const Json* Json::find(std::string_view key) const {
  const auto at = std::lower_bound(object.begin(), object.end(), key,
                                   [](const auto& member, std::string_view wanted) { return member.first < wanted; });
  return at != object.end() && at->first == key ? &at->second : nullptr;
}

namespace {

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  bool parse(Json* value) {
    if (!parse_value(value, 0)) return false;
    skip_space();
    return at_ == text_.size() || fail("bytes after the end");
  }

  std::string error() const { return error_ + " at byte " + std::to_string(at_); }

 private:
  static constexpr int kMaxDepth = 16;

  bool fail(const char* what) {
    if (error_.empty()) error_ = what;
    return false;
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t'))
      ++at_;
  }

  bool accept(char wanted) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  bool parse_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return fail("not a JSON value");
    at_ += word.size();
    return true;
  }

  bool parse_value(Json* value, int depth) {
    if (depth > kMaxDepth) return fail("nested too deeply");
    skip_space();
    if (at_ >= text_.size()) return fail("unexpected end");
    switch (text_[at_]) {
      case '{':
        return parse_object(value, depth);
      case '[':
        return parse_array(value, depth);
      case '"':
        value->kind = Json::Kind::kString;
        return parse_string(&value->string);
      case 't':
        value->kind = Json::Kind::kBool;
        value->boolean = true;
        return parse_word("true");
      case 'f':
        value->kind = Json::Kind::kBool;
        return parse_word("false");
      case 'n':
        return parse_word("null");
      case 'N':
      case 'I':
        value->kind = Json::Kind::kNumber;
        return parse_word(text_[at_] == 'N' ? "NaN" : "Infinity");
      default:
        return parse_number(value);
    }
  }

  bool parse_number(Json* value) {
    const size_t start = at_;
    if (text_.substr(at_, 9) == "-Infinity") {
      value->kind = Json::Kind::kNumber;
      at_ += 9;
      return true;
    }
    bool digits_only = true;
    while (at_ < text_.size() && (std::string_view("+-.eE0123456789").find(text_[at_]) != std::string_view::npos)) {
      digits_only &= text_[at_] >= '0' && text_[at_] <= '9';
      ++at_;
    }
    const std::string_view number = text_.substr(start, at_ - start);
    if (number.empty()) return fail("not a JSON value");
    value->kind = Json::Kind::kNumber;
    value->string = number;
    value->integral = digits_only && number.size() <= 18;
    if (value->integral) {
      for (const char digit : number) value->integer = value->integer * 10 + (digit - '0');
    }
    return true;
  }

  bool parse_hex(uint32_t* code) {
    if (at_ + 4 > text_.size()) return fail("unexpected end");
    *code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = text_[at_++];
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) return fail("bad \\u escape");
      *code = *code * 16 + static_cast<uint32_t>(digit);
    }
    return true;
  }

  static void append_utf8(uint32_t code, std::string* out) {
    if (code < 0x80) {
      *out += static_cast<char>(code);
    } else if (code < 0x800) {
      *out += static_cast<char>(0xc0 | (code >> 6));
      *out += static_cast<char>(0x80 | (code & 0x3f));
    } else {
      *out += static_cast<char>(0xe0 | (code >> 12));
      *out += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
      *out += static_cast<char>(0x80 | (code & 0x3f));
    }
  }

  bool parse_escape(std::string* out) {
    if (at_ >= text_.size()) return fail("unexpected end");
    const char c = text_[at_++];
    switch (c) {
      case '"':
      case '\\':
      case '/':
        *out += c;
        return true;
      case 'b':
        *out += '\b';
        return true;
      case 'f':
        *out += '\f';
        return true;
      case 'n':
        *out += '\n';
        return true;
      case 'r':
        *out += '\r';
        return true;
      case 't':
        *out += '\t';
        return true;
      case 'u': {
        uint32_t code;
        if (!parse_hex(&code)) return false;
        append_utf8(code, out);  // surrogates stay apart: tensor names have none
        return true;
      }
      default:
        return fail("unknown escape");
    }
  }

  bool parse_string(std::string* out) {
    ++at_;
    for (;;) {
      if (at_ >= text_.size()) return fail("string without an end");
      const char c = text_[at_++];
      if (c == '"') return true;
      if (static_cast<unsigned char>(c) < 0x20) return fail("control character in a string");
      if (c != '\\') {
        *out += c;
      } else if (!parse_escape(out)) {
        return false;
      }
    }
  }

  bool parse_array(Json* value, int depth) {
    value->kind = Json::Kind::kArray;
    ++at_;
    if (accept(']')) return true;
    do {
      value->array.emplace_back();
      if (!parse_value(&value->array.back(), depth + 1)) return false;
    } while (accept(','));
    return accept(']') || fail("expected , or ]");
  }

  bool parse_object(Json* value, int depth) {
    value->kind = Json::Kind::kObject;
    ++at_;
    if (accept('}')) return true;
    do {
      skip_space();
      if (at_ >= text_.size() || text_[at_] != '"') return fail("expected a key");
      auto& member = value->object.emplace_back();
      if (!parse_string(&member.first)) return false;
      if (!accept(':')) return fail("expected :");
      if (!parse_value(&member.second, depth + 1)) return false;
    } while (accept(','));
    if (!accept('}')) return fail("expected , or }");
    auto& members = value->object;
    std::sort(members.begin(), members.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    const auto twice = std::adjacent_find(members.begin(), members.end(),
                                          [](const auto& a, const auto& b) { return a.first == b.first; });
    return twice == members.end() || fail("duplicate key");
  }

  std::string_view text_;
  size_t at_ = 0;
  std::string error_;
};

}  // namespace

bool parse_json(std::string_view text, Json* value, std::string* error) {
  Parser parser(text);
  if (parser.parse(value)) return true;
  *error = parser.error();
  return false;
}

}  // namespace kt
