// Which accesses to memory are ordered: a vector clock per stream (Fidge, 1988; Mattern, 1989), and per range
// of bytes the last write and the reads since.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace emulated {

// How many operations of each stream are known to be done.
struct Clock {
  std::vector<uint64_t> done;

  uint64_t operator[](size_t stream) const { return stream < done.size() ? done[stream] : 0; }
  void advance(size_t stream, uint64_t to) {
    if (done.size() <= stream) done.resize(stream + 1);
    done[stream] = std::max(done[stream], to);
  }
  void merge(const Clock& other) {
    for (size_t i = 0; i < other.done.size(); i++) advance(i, other.done[i]);
  }
};

// The `time`-th operation of a stream.
struct Moment {
  size_t stream;
  uint64_t time;
  const std::string* op;

  bool is_before(const Clock& clock) const { return clock[stream] >= time; }
};

struct Range {
  uintptr_t begin, end;
  bool writes;
};

class Accesses {
 public:
  struct Conflict { Moment earlier; bool wrote; };

  // Note an access by an operation that comes after all in `clock`; returns those that it is not ordered after.
  std::vector<Conflict> add(const Range& range, const Moment& now, const Clock& clock) {
    if (range.begin == range.end) return {};
    auto found = unordered(range, clock);
    if (range.writes) {
      forget(range.begin, range.end);
      bytes.emplace(range.begin, Bytes{range.end, now, {}});
      return found;
    }
    uintptr_t at = range.begin;  // parts that nobody has touched are noted too
    for (auto it = first(range.begin, range.end); at < range.end; ++it) {
      auto next = it == bytes.end() ? range.end : std::min(it->first, range.end);
      if (at < next) it = bytes.emplace_hint(it, at, Bytes{next, {}, {}});
      auto& reads = it->second.reads;
      auto same = std::find_if(reads.begin(), reads.end(), [&](auto& each) { return each.stream == now.stream; });
      if (same == reads.end()) reads.push_back(now);
      else *same = now;
      at = it->second.end;
    }
    return found;
  }
  std::vector<Conflict> unordered(const Range& range, const Clock& clock) {
    std::vector<Conflict> found;
    for (auto it = first(range.begin, range.end); it != bytes.end() && it->first < range.end; ++it) {
      auto& [_, part] = *it;
      if (part.write && !part.write->is_before(clock)) found.push_back({*part.write, true});
      for (auto& read : part.reads)
        if (range.writes && !read.is_before(clock)) found.push_back({read, false});
    }
    return found;
  }
  void forget(uintptr_t begin, uintptr_t end) {
    auto it = first(begin, end);
    while (it != bytes.end() && it->first < end) it = bytes.erase(it);
  }

 private:
  struct Bytes {
    uintptr_t end;
    std::optional<Moment> write;
    std::vector<Moment> reads;  // at most one of each stream
  };
  std::map<uintptr_t, Bytes> bytes;  // by where they begin; none overlap

  void split(uintptr_t at) {
    auto it = bytes.lower_bound(at);
    if (it == bytes.begin() || (--it)->second.end <= at) return;
    bytes.emplace(at, it->second);
    it->second.end = at;
  }
  std::map<uintptr_t, Bytes>::iterator first(uintptr_t begin, uintptr_t end) {
    split(begin), split(end);
    return bytes.lower_bound(begin);
  }
};
}  // namespace emulated
