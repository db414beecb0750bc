// RDMA by the Python package hymcache.transport.verbs, as the core calls it from threads that do
// not hold the GIL. For bindings only.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/csrc/python_callbacks.h"
#include "transport/csrc/verbs.h"

namespace hymcache {

// Whatever Python raises is thrown as Unavailable with its text: there is another way for the
// bytes.
template <class F>
auto unavailable_on_error(F call) {
  const pybind11::gil_scoped_acquire gil;
  try {
    return call();
  } catch (pybind11::error_already_set& error) {
    throw Error(ErrorKind::kUnavailable, std::string(pybind11::str(error.value())));
  } catch (const pybind11::cast_error& error) {
    throw Error(ErrorKind::kUnavailable, error.what());
  }
}

// For calls that must not fail: what goes wrong is reported and does not reach the core.
template <class F>
void reported_on_error(const char* where, F call) noexcept {
  const pybind11::gil_scoped_acquire gil;
  try {
    call();
  } catch (pybind11::error_already_set& error) {
    error.discard_as_unraisable(where);
  }
}

inline pybind11::bytes endpoint_bytes(const wire::LinkEndpoint& endpoint) {
  return {reinterpret_cast<const char*>(&endpoint), sizeof endpoint};
}

inline wire::LinkEndpoint to_endpoint(const pybind11::bytes& raw) {
  const std::string_view bytes(raw);
  wire::LinkEndpoint endpoint;
  std::memcpy(&endpoint, bytes.data(), std::min(bytes.size(), sizeof endpoint));
  return endpoint;
}

class PythonVerbsLink final : public VerbsLink {
 public:
  using Registrations = std::shared_ptr<const std::atomic<std::uint64_t>>;

  PythonVerbsLink(std::shared_ptr<pybind11::object> link, Registrations registrations)
      : link_(std::move(link)), registrations_(std::move(registrations)) {}
  ~PythonVerbsLink() override {
    reported_on_error(__func__, [this] { link_->attr("close")(); });
  }

  wire::LinkEndpoint endpoint() override {
    return unavailable_on_error(
        [this] { return to_endpoint(link_->attr("endpoint").cast<pybind11::bytes>()); });
  }
  void connect(const wire::LinkEndpoint& peer) override {
    unavailable_on_error([&] { link_->attr("connect")(endpoint_bytes(peer)); });
  }
  void transfer(VerbsOpcode opcode, std::span<const VerbsPiece> pieces,
                TimePoint deadline) override {
    unavailable_on_error([&] {
      pybind11::list rows(pieces.size());
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        const VerbsPiece& piece = pieces[i];
        rows[i] = pybind11::make_tuple(piece.local_address, piece.local_key, piece.remote_address,
                                       piece.remote_key, piece.bytes, piece.fenced);
      }
      const std::chrono::duration<double> left = deadline - Clock::now();
      link_->attr("transfer")(static_cast<int>(opcode), rows, std::max(0.0, left.count()));
    });
  }
  LocalMemory allocate(std::size_t bytes) override {
    return unavailable_on_error([&] {
      const auto [address, key] =
          link_->attr("allocate")(bytes).cast<std::pair<std::uintptr_t, std::uint32_t>>();
      return LocalMemory{.data = reinterpret_cast<std::byte*>(address), .bytes = bytes, .key = key};
    });
  }
  std::optional<std::uint32_t> local_key(const void* data, std::size_t bytes) override {
    refresh();
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    for (const auto& [address, length, key] : regions_) {
      if (begin >= address && begin - address <= length && bytes <= length - (begin - address)) {
        return key;
      }
    }
    return std::nullopt;
  }

 private:
  using Region = std::tuple<std::uintptr_t, std::uint64_t, std::uint32_t>;

  void refresh() {
    const std::uint64_t now = registrations_->load(std::memory_order_acquire);
    if (now == known_) return;
    regions_ = unavailable_on_error(
        [this] { return link_->attr("regions")().cast<std::vector<Region>>(); });
    known_ = now;
  }

  const std::shared_ptr<pybind11::object> link_;
  const Registrations registrations_;
  std::uint64_t known_ = 0;
  std::vector<Region> regions_;
};

class PythonVerbsInitiator final : public VerbsInitiator {
 public:
  explicit PythonVerbsInitiator(pybind11::object initiator)
      : bounce_bytes_(initiator.attr("bounce_bytes").cast<std::size_t>()),
        initiator_(keep_python(std::move(initiator))) {}
  ~PythonVerbsInitiator() override { close(); }

  std::unique_ptr<VerbsLink> open() override {
    return unavailable_on_error([this] {
      return std::make_unique<PythonVerbsLink>(keep_python(initiator_->attr("open")()),
                                               registrations_);
    });
  }
  // Called from Python: its exceptions pass through.
  void register_memory(const void* data, std::size_t bytes) override {
    initiator_->attr("register")(reinterpret_cast<std::uintptr_t>(data), bytes);
    // Pairs with the acquire of whoever looks a key up.
    registrations_->fetch_add(1, std::memory_order_release);
  }
  std::size_t bounce_bytes() const override { return bounce_bytes_; }
  void tell_fallbacks(std::uint64_t calls, const std::string& reason) noexcept override {
    reported_on_error(__func__, [&] { initiator_->attr("tell_fallbacks")(calls, reason); });
  }
  void close() noexcept override {
    reported_on_error(__func__, [this] { initiator_->attr("close")(); });
  }

 private:
  const std::size_t bounce_bytes_;
  const std::shared_ptr<pybind11::object> initiator_;
  const std::shared_ptr<std::atomic<std::uint64_t>> registrations_ =
      std::make_shared<std::atomic<std::uint64_t>>(0);
};

class PythonVerbsAcceptor final : public VerbsAcceptor {
 public:
  explicit PythonVerbsAcceptor(pybind11::object acceptor)
      : acceptor_(keep_python(std::move(acceptor))) {}
  ~PythonVerbsAcceptor() override { close(); }

  // Called from Python: its exceptions pass through.
  bool prepare(std::uint8_t* base, std::uint64_t bytes, std::uint64_t read_write_offset) override {
    const auto address = reinterpret_cast<std::uintptr_t>(base);
    return acceptor_->attr("prepare")(address, bytes, read_write_offset).cast<bool>();
  }
  Accepted accept(std::uint64_t peer, const wire::LinkEndpoint& endpoint) override {
    using Row = std::tuple<std::uint64_t, std::uint64_t, std::uint32_t, std::uint32_t>;
    return unavailable_on_error([&] {
      const auto [mine, block_keys, rows] =
          acceptor_->attr("accept")(peer, endpoint_bytes(endpoint))
              .cast<std::tuple<pybind11::bytes, bool, std::vector<Row>>>();
      Accepted accepted{.endpoint = to_endpoint(mine), .block_keys = block_keys, .regions = {}};
      for (const auto& [offset, bytes, key, access] : rows) {
        accepted.regions.push_back(
            {.region_offset = offset, .bytes = bytes, .key = key, .access = access});
      }
      return accepted;
    });
  }
  std::vector<wire::VerbsKey> bind(std::uint64_t peer, std::span<const Range> ranges,
                                   bool writable) override {
    try {
      return unavailable_on_error([&] {
        pybind11::list rows(ranges.size());
        for (std::size_t i = 0; i < ranges.size(); ++i) {
          rows[i] = pybind11::make_tuple(ranges[i].region_offset, ranges[i].bytes);
        }
        return acceptor_->attr("bind")(peer, rows, writable).cast<std::vector<wire::VerbsKey>>();
      });
    } catch (const Error&) {
      return std::vector<wire::VerbsKey>(ranges.size(), 0);  // they go another way
    }
  }
  bool unbind(std::uint64_t peer, std::span<const wire::VerbsKey> keys) noexcept override {
    bool ended = false;
    reported_on_error(__func__, [&] {
      const std::vector<wire::VerbsKey> list(keys.begin(), keys.end());
      ended = acceptor_->attr("unbind")(peer, list).cast<bool>();
    });
    return ended;
  }
  void drop(std::uint64_t peer) noexcept override {
    reported_on_error(__func__, [&] { acceptor_->attr("drop")(peer); });
  }
  void close() noexcept override {
    reported_on_error(__func__, [this] { acceptor_->attr("close")(); });
  }

 private:
  const std::shared_ptr<pybind11::object> acceptor_;
};

}  // namespace hymcache
