// Runs code that is written over a word type in every interleaving of its memory accesses.
//
// A state is the memory, and of each thread its place: which of its operations it is in, what it
// has carried there, and what its accesses since have answered. A thread has no stack of its own:
// to take its next step its operation runs from the start, is given the answers that it had, does
// one access for real and is left by a jump when it comes to the next. So states can be kept,
// compared and gone back to, and each is visited once.
//
// Accesses are sequentially consistent: orders are argued in docs/region-format.md, and what
// hardware and compiler make of them is seen by TSan and by the tests with processes.
#pragma once

#include <array>
#include <atomic>
#include <csetjmp>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace hymcache::testing {

using Locals = std::array<std::uint64_t, 6>;

struct ThreadState {
  std::uint32_t next_operation = 0;
  bool dead = false;
  Locals locals{};
  std::vector<std::uint64_t> answers;  // of the accesses of the operation it is in
};

struct ModelState {
  std::vector<std::uint64_t> memory;
  std::vector<ThreadState> threads;
  std::string violation;  // of what an operation has asserted
};

// What may happen to a thread.
struct Operation {
  std::function<void(Locals&)> run;
  // Whether it may begin; always, where there is none.
  std::function<bool(const ModelState&)> guard;
};
struct ModelThread {
  std::vector<Operation> operations;
  bool may_die = false;  // at any access
};

class Interpreter {
 public:
  static Interpreter*& current() {
    static Interpreter* interpreter = nullptr;
    return interpreter;
  }

  // One access of a thread: `perform` gives the answer and changes the memory.
  template <class Perform>
  std::uint64_t access(bool quiet, Perform perform) {
    std::vector<std::uint64_t>& answers = state->threads[thread].answers;
    if (position < answers.size()) return answers[position++];
    if (stepped && !quiet) std::longjmp(leave, 1);
    stepped = stepped || !quiet;
    answers.push_back(perform());
    return answers[position++];
  }

  void violate(const std::string& what) {
    if (state->violation.empty()) state->violation = what;
  }

  // Takes one step of a thread; the operation may come to its end in it.
  void step(ModelState& in, std::size_t which, const Operation& operation) {
    state = &in;
    thread = which;
    position = 0;
    stepped = false;
    current() = this;
    locals_ = in.threads[which].locals;
    if (setjmp(leave) != 0) return;  // nothing on the way has a destructor that does anything
    operation.run(locals_);
    ThreadState& done = in.threads[which];
    done.locals = locals_;
    done.answers.clear();
    ++done.next_operation;
  }

  ModelState* state = nullptr;
  std::size_t thread = 0;
  std::size_t position = 0;
  bool stepped = false;
  std::jmp_buf leave;

 private:
  Locals locals_{};
};

// Stands in for std::atomic<std::uint64_t>; its value is in the state that is being run.
class ModelWord {
 public:
  std::uint32_t index = 0;
  bool quiet = false;  // no other thread minds when it is accessed

  std::uint64_t load(std::memory_order) const {
    return machine().access(quiet, [&] { return value(); });
  }
  void store(std::uint64_t to, std::memory_order) {
    machine().access(quiet, [&] { return value() = to; });
  }
  bool compare_exchange_strong(std::uint64_t& expected, std::uint64_t desired, std::memory_order,
                               std::memory_order) {
    // The answer is what was there, and so tells whether it was exchanged.
    const std::uint64_t wanted = expected;
    expected = machine().access(quiet, [&] {
      const std::uint64_t was = value();
      if (was == wanted) value() = desired;
      return was;
    });
    return expected == wanted;
  }

 private:
  static Interpreter& machine() { return *Interpreter::current(); }
  std::uint64_t& value() const { return machine().state->memory[index]; }
};

inline void require_in_model(bool holds, const char* what) {
  if (!holds) Interpreter::current()->violate(what);
}

struct Exploration {
  std::uint64_t states = 0;
  std::uint64_t ends = 0;  // states in which no thread can go on
  std::string violation;
};

// Visits every state that can be reached; stops at the first violation. `check` is asked in every
// state, with whether it is an end, and answers what is wrong, or nothing.
inline Exploration explore(const ModelState& start, const std::vector<ModelThread>& threads,
                           const std::function<std::string(const ModelState&, bool)>& check,
                           std::uint64_t states_max) {
  Exploration result;
  std::unordered_set<std::string> seen;
  std::vector<ModelState> stack{start};
  Interpreter interpreter;
  const auto key_of = [](const ModelState& state) {
    // 128 bits stand for a state: two of a billion states have equal ones once in 10^20 runs.
    std::array<std::uint64_t, 2> hash{0x9e3779b97f4a7c15, 0xc2b2ae3d27d4eb4f};
    const auto mix = [&hash](std::uint64_t value) {
      hash[0] = (hash[0] ^ value) * 0xff51afd7ed558ccd;
      hash[0] ^= hash[0] >> 32;
      hash[1] = (hash[1] + value) * 0xc4ceb9fe1a85ec53;
      hash[1] ^= hash[1] >> 29;
    };
    for (const std::uint64_t word : state.memory) mix(word);
    for (const ThreadState& thread : state.threads) {
      mix(std::uint64_t{thread.next_operation} << 1 | thread.dead);
      for (const std::uint64_t local : thread.locals) mix(local);
      mix(thread.answers.size());
      for (const std::uint64_t answer : thread.answers) mix(answer);
    }
    return std::string(reinterpret_cast<const char*>(hash.data()), sizeof hash);
  };
  seen.insert(key_of(start));
  while (!stack.empty()) {
    const ModelState state = std::move(stack.back());
    stack.pop_back();
    ++result.states;
    bool is_end = true;
    const auto go_to = [&](ModelState next) {
      if (seen.insert(key_of(next)).second) stack.push_back(std::move(next));
    };
    for (std::size_t i = 0; i < threads.size(); ++i) {
      const ThreadState& thread = state.threads[i];
      if (thread.dead || thread.next_operation == threads[i].operations.size()) continue;
      const Operation& operation = threads[i].operations[thread.next_operation];
      if (thread.answers.empty() && operation.guard && !operation.guard(state)) continue;
      is_end = false;
      ModelState next = state;
      interpreter.step(next, i, operation);
      // Now: but for what it has asserted, this state may be one that was seen.
      if (!next.violation.empty()) {
        result.violation = next.violation;
        return result;
      }
      go_to(std::move(next));
      if (!threads[i].may_die) continue;
      ModelState without = state;
      without.threads[i].dead = true;
      without.threads[i].answers.clear();
      go_to(std::move(without));
    }
    result.ends += is_end;
    result.violation = check(state, is_end);
    if (!result.violation.empty()) return result;
    if (result.states > states_max) {
      result.violation = "more states than were allowed for";
      return result;
    }
  }
  return result;
}

}  // namespace hymcache::testing
