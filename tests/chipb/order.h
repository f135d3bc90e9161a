// What happens before what: a vector clock for each stream and one for the host, and for each block
// of memory who used it. Work is done at once, but whoever reads or writes what another stream
// writes or reads, and waited for it by no event, fails as if it were not: with the names of both,
// as torch.cuda._sanitizer does for CUDA.

#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

using Clock = std::map<c10::StreamId, int64_t>; // of each stream, how many operations are done

inline void join(Clock& into, const Clock& from) {
  for (const auto& [stream, number] : from) {
    auto& known = into[stream];
    known = std::max(known, number);
  }
}

inline bool knows(const Clock& clock, c10::StreamId stream, int64_t number) {
  const auto found = clock.find(stream);
  return found != clock.end() && found->second >= number;
}

/// A part of a block that an operation reads or writes.
struct Use {
  c10::StreamId stream;
  int64_t number;
  const std::string* what;
  bool writes;
  const char* low;
  const char* high;
  bool is_freed = false; // it was of another tensor, whose memory this is now
};

using Uses = std::vector<Use>;

class Order {
 public:
  /// The number of a stream's next operation, which knows what the host knows.
  int64_t begin(c10::StreamId stream) {
    auto& clock = clocks_[stream];
    join(clock, host_);
    return ++clock[stream];
  }

  /// An operation uses a part of a block that has been used like this before.
  void check(Uses& uses, const Use& now) {
    const auto& clock = clocks_[now.stream];
    for (const auto& use : uses) {
      const bool meets = use.low < now.high && now.low < use.high && (use.writes || now.writes);
      TORCH_CHECK(!meets || use.stream == now.stream || knows(clock, use.stream, use.number),
                  *now.what, " on stream ", now.stream, now.writes ? " writes" : " reads", " what ",
                  *use.what, " on stream ", use.stream, use.writes ? " writes" : " reads",
                  use.is_freed ? ", whose memory was freed without record_stream" : "",
                  ": no event makes it wait");
    }
  }

  void keep(Uses& uses, const Use& now) {
    const auto is_past = [&](const Use& use) {
      const bool is_inside = now.low <= use.low && use.high <= now.high;
      return is_inside && (now.writes || (use.stream == now.stream && !use.writes));
    };
    uses.erase(std::remove_if(uses.begin(), uses.end(), is_past), uses.end());
    uses.push_back(now);
  }

  Clock at(c10::StreamId stream) {
    auto clock = clocks_[stream];
    join(clock, host_);
    return clock;
  }
  void wait(c10::StreamId stream, const Clock& event) {
    join(clocks_[stream], event);
  }
  void wait_on_host(const Clock& event) {
    join(host_, event);
  }

  /// Memory of ``stream`` is free again: who may still use it, for whoever gets it next.
  void free(c10::StreamId stream, const Uses& uses, const std::set<c10::StreamId>& lent) {
    for (auto use : uses) {
      if (use.stream != stream && !lent.count(use.stream)) {
        use.is_freed = true;
        freed_[stream].push_back(use);
      }
    }
  }

  /// New memory of ``stream``: as if all that was freed and may be in use were a part of it.
  Uses allocate(c10::StreamId stream, const char* low, const char* high) {
    static const std::string allocation = "allocating";
    const auto known = at(stream);
    Uses uses = {{stream, clocks_[stream][stream], &allocation, true, low, high}};
    for (auto use : freed_[stream]) {
      if (!knows(known, use.stream, use.number)) {
        use.low = low;
        use.high = high;
        uses.push_back(use);
      }
    }
    freed_[stream].clear();
    return uses;
  }

  const std::string* name(const std::string& what) {
    return &*names_.insert(what).first;
  }

  /// Another job begins.
  void forget() {
    clocks_.clear();
    host_.clear();
    freed_.clear();
  }

 private:
  std::map<c10::StreamId, Clock> clocks_;
  std::map<c10::StreamId, Uses> freed_;
  std::set<std::string> names_;
  Clock host_;
};
