// Outcome of an operation: a kind and a message that a user can act on. Nothing in csrc prints or aborts.
#pragma once

#include <string>
#include <utility>

namespace kt {

enum class StatusCode { kOk, kInvalidValue, kUnknownName, kNotFound, kBadCheckpoint, kNumerics, kLostRank };

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status invalid_value(std::string message) { return {StatusCode::kInvalidValue, std::move(message)}; }
inline Status bad_checkpoint(std::string message) { return {StatusCode::kBadCheckpoint, std::move(message)}; }

}  // namespace kt

#define KT_RETURN_IF_ERROR(expression)                                            \
  do {                                                                            \
    if (::kt::Status kt_status = (expression); !kt_status.ok()) return kt_status; \
  } while (false)
