#include "ops/attention/chunked.h"

#include <algorithm>

namespace kt {

bool cut_at_chunks(const std::vector<KvSequence>& sequences, int64_t chunk, std::vector<KvSequence>* parts) {
  parts->clear();
  const auto fits = [chunk](const KvSequence& sequence) { return sequence.keys() <= chunk; };
  if (std::all_of(sequences.begin(), sequences.end(), fits)) return false;
  for (const KvSequence& whole : sequences) {
    for (int64_t query = 0; query < whole.queries;) {
      const int64_t position = whole.prefix + query, first = position / chunk * chunk;
      KvSequence part = whole;
      part.first_query = whole.first_query + query;
      part.queries = std::min(whole.queries - query, first + chunk - position);
      part.prefix = position - first;
      if (whole.slots) {
        part.slots = whole.slots + first;
      } else {
        part.first_key = whole.first_key + first;
      }
      parts->push_back(part);
      query += part.queries;
    }
  }
  return true;
}

}  // namespace kt
