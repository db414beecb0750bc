// Bindings of the directory of shared regions; typed in hymcache/_core.pyi, beside SharedRegion.
#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "lookup/csrc/region_directory.h"
#include "transport/csrc/python_values.h"

namespace py = pybind11;

namespace hymcache {
namespace {

using region::Region;
using region::RegionDirectory;
using region::RegionStatus;
using Numbers = py::array_t<std::uint64_t, py::array::c_style | py::array::forcecast>;

std::shared_ptr<RegionDirectory> make_directory(std::shared_ptr<Region> region,
                                                const std::string& name, bool checksums,
                                                unsigned threads, double high_watermark,
                                                double low_watermark, bool maintain) {
  if (threads == 0 || threads > 64) {
    throw Error(ErrorKind::kConfig,
                "threads " + std::to_string(threads) + " is out of range; write 1 to 64");
  }
  const py::gil_scoped_release release;
  return std::make_shared<RegionDirectory>(
      std::move(region), region::DirectoryOptions{.name = name,
                                                  .checksums = checksums,
                                                  .threads = threads,
                                                  .high_watermark = high_watermark,
                                                  .low_watermark = low_watermark,
                                                  .maintain = maintain});
}

// The segments of each key, from arrays of addresses and sizes.
class SegmentTable {
 public:
  SegmentTable(std::size_t keys, const Numbers& addresses, const Numbers& sizes) {
    const auto shape_fault = [](const char* what) {
      throw Error(ErrorKind::kConfig,
                  std::string(what) +
                      " has the wrong shape: addresses need a row a key, sizes one "
                      "row or a row a key, both a column a segment");
    };
    if (addresses.ndim() != 2 || static_cast<std::size_t>(addresses.shape(0)) != keys) {
      shape_fault("addresses");
    }
    columns_ = static_cast<std::size_t>(addresses.shape(1));
    const bool shared = sizes.ndim() == 1 || (sizes.ndim() == 2 && sizes.shape(0) == 1);
    if (sizes.ndim() < 1 || sizes.ndim() > 2 ||
        static_cast<std::size_t>(sizes.shape(sizes.ndim() - 1)) != columns_ ||
        (!shared && static_cast<std::size_t>(sizes.shape(0)) != keys)) {
      shape_fault("sizes");
    }
    segments_.reserve(keys * columns_);
    for (std::size_t i = 0; i < keys * columns_; ++i) {
      const std::uint64_t bytes = sizes.data()[shared ? i % columns_ : i];
      segments_.push_back({reinterpret_cast<void*>(addresses.data()[i]), bytes});
    }
  }

  std::span<const Segment> of(std::size_t key) const {
    return std::span(segments_).subspan(key * columns_, columns_);
  }

 private:
  std::size_t columns_ = 0;
  std::vector<Segment> segments_;
};

py::bytes to_bytes(const std::vector<RegionStatus>& statuses) {
  return {reinterpret_cast<const char*>(statuses.data()), statuses.size()};
}

// Runs call(keys, statuses) without the GIL.
template <class Call>
py::bytes answer(const py::bytes& raw_keys, Call call) {
  const std::vector<ObjectKey> keys = to_keys(raw_keys);
  std::vector<RegionStatus> out(keys.size(), RegionStatus::kMiss);
  {
    const py::gil_scoped_release release;
    call(std::span<const ObjectKey>(keys), std::span<RegionStatus>(out));
  }
  return to_bytes(out);
}

py::bytes lookup(RegionDirectory& directory, const py::bytes& keys) {
  return answer(keys, [&](auto names, auto out) { directory.lookup(names, out); });
}

py::bytes store(RegionDirectory& directory, const py::bytes& keys, const Numbers& addresses,
                const Numbers& sizes, std::uint64_t name_space) {
  const SegmentTable table(py::len(keys) / sizeof(ObjectKey), addresses, sizes);
  return answer(keys, [&](auto names, auto out) {
    directory.store(names, [&](std::size_t i) { return table.of(i); }, name_space, out);
  });
}

py::bytes load(RegionDirectory& directory, const py::bytes& keys, const Numbers& addresses,
               const Numbers& sizes) {
  const SegmentTable table(py::len(keys) / sizeof(ObjectKey), addresses, sizes);
  return answer(keys, [&](auto names, auto out) {
    directory.load(names, [&](std::size_t i) { return table.of(i); }, out);
  });
}

py::tuple pin(RegionDirectory& directory, const py::bytes& keys) {
  RegionDirectory::Ticket ticket = 0;
  const py::bytes found =
      answer(keys, [&](auto names, auto out) { ticket = directory.pin(names, out); });
  return py::make_tuple(ticket, found);
}

py::dict stats(RegionDirectory& directory) {
  const region::DirectoryStats& counters = directory.stats();
  py::dict out;
  out["lookups"] = counters.lookups.load();
  out["lookup_keys"] = counters.lookup_keys.load();
  out["lookup_hits"] = counters.lookup_hits.load();
  const auto stored = [&](RegionStatus status) {
    return counters.stored[static_cast<std::size_t>(status)].load();
  };
  const auto loaded = [&](RegionStatus status) {
    return counters.loaded[static_cast<std::size_t>(status)].load();
  };
  out["stored"] = stored(RegionStatus::kOk);
  out["store_already"] = stored(RegionStatus::kStoredAlready);
  out["store_pending"] = stored(RegionStatus::kPending);
  out["store_full"] = stored(RegionStatus::kFull);
  out["store_wrong_size"] = stored(RegionStatus::kWrongSize);
  out["store_lost"] = stored(RegionStatus::kLost);
  out["loaded"] = loaded(RegionStatus::kOk);
  out["load_miss"] = loaded(RegionStatus::kMiss);
  out["load_corrupt"] = loaded(RegionStatus::kCorrupt);
  out["load_wrong_size"] = loaded(RegionStatus::kWrongSize);
  out["stored_bytes"] = counters.stored_bytes.load();
  out["loaded_bytes"] = counters.loaded_bytes.load();
  out["loads_overtaken"] = counters.loads_overtaken.load();
  out["pins"] = counters.pins.load();
  out["pins_missed"] = counters.pins_missed.load();
  out["pins_full"] = counters.pins_full.load();
  out["evicted_for_room"] = counters.evicted_for_room.load();
  out["evicted_by_watermark"] = counters.evicted_by_watermark.load();
  out["removed"] = counters.removed.load();
  out["reclaimed"] = counters.reclaimed.load();
  out["buried"] = counters.buried.load();
  out["rejoined"] = directory.rejoined();
  return out;
}

constexpr const char* kStateNames[] = {"free", "writing", "valid", "dying"};

py::dict named(const RegionDirectory::StateCounts& counts) {
  py::dict out;
  for (std::size_t i = 0; i < counts.size(); ++i) out[kStateNames[i]] = counts[i];
  return out;
}

py::dict slots_by_state(RegionDirectory& directory) {
  RegionDirectory::StateCounts counts;
  {
    const py::gil_scoped_release release;
    counts = directory.slots_by_state();
  }
  return named(counts);
}

py::dict usage(RegionDirectory& directory) {
  constexpr std::size_t kNamespacesTold = 32;
  RegionDirectory::Usage used;
  {
    const py::gil_scoped_release release;
    used = directory.usage();
  }
  py::dict out = named(used.by_state);
  out["pinned"] = used.pinned;
  out["stored_bytes"] = used.stored_bytes;
  std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> rows;
  for (const auto& [name_space, held] : used.namespaces) {
    rows.emplace_back(name_space, held.first, held.second);
  }
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return std::get<2>(a) > std::get<2>(b); });
  if (rows.size() > kNamespacesTold) rows.resize(kNamespacesTold);
  out["namespaces"] = rows;
  return out;
}

py::list entries(RegionDirectory& directory, std::uint32_t first, std::uint32_t count) {
  py::list out;
  for (const RegionDirectory::SlotView& view : directory.entries(first, count)) {
    const ObjectKey key = view.key.key();
    py::dict row;
    row["slot"] = view.slot;
    row["state"] = kStateNames[static_cast<std::size_t>(view.word.state())];
    row["key"] = py::bytes(reinterpret_cast<const char*>(key.data()), key.size());
    row["name_space"] = view.info.name_space;
    row["length"] = view.info.length;
    row["crc32c"] = view.info.has_crc ? py::object(py::int_(view.info.crc32c)) : py::none();
    row["generation"] = view.word.generation();
    row["referenced"] = view.word.referenced();
    row["writer"] = view.word.owner();
    row["stored_at_ms"] = view.info.stored_at_ms;
    out.append(row);
  }
  return out;
}

py::list participants(RegionDirectory& directory) {
  static constexpr const char* kStates[] = {"free", "active", "dead", "dead"};
  py::list out;
  for (const RegionDirectory::ParticipantView& view : directory.participants()) {
    py::dict row;
    row["index"] = view.index;
    row["epoch"] = view.epoch;
    row["name"] = py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
        view.name.data(), static_cast<py::ssize_t>(view.name.size()), "replace"));
    row["state"] = kStates[static_cast<std::size_t>(view.state)];
    row["beats"] = view.beats;
    row["silent_ms"] = view.silent_ms;
    row["pins"] = view.pins;
    out.append(row);
  }
  return out;
}

void bind_status(py::module_& m) {
  py::native_enum<RegionStatus>(m, "RegionStatus", "enum.IntEnum",
                                "What became of one key in a shared region.")
      .value("OK", RegionStatus::kOk)
      .value("MISS", RegionStatus::kMiss)
      .value("CORRUPT", RegionStatus::kCorrupt)
      .value("PENDING", RegionStatus::kPending)
      .value("STORED_ALREADY", RegionStatus::kStoredAlready)
      .value("FULL", RegionStatus::kFull)
      .value("WRONG_SIZE", RegionStatus::kWrongSize)
      .value("LOST", RegionStatus::kLost)
      .finalize();
}

}  // namespace

void bind_region_directory(py::module_& m) {
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  bind_status(m);
  const region::DirectoryOptions options;
  py::class_<RegionDirectory, std::shared_ptr<RegionDirectory>>(
      m, "RegionDirectory", py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_directory), py::arg("region"), py::kw_only(), py::arg("name") = "",
           py::arg("verify_checksums") = true, py::arg("threads") = 1,
           py::arg("high_watermark") = options.high_watermark,
           py::arg("low_watermark") = options.low_watermark, py::arg("maintain") = true)
      .def_property_readonly("participant", &RegionDirectory::participant)
      .def("lookup", &lookup, py::arg("keys"))
      .def(
          "touch",
          [](RegionDirectory& directory, const py::bytes& raw) {
            const std::vector<ObjectKey> keys = to_keys(raw);
            const py::gil_scoped_release release;
            directory.touch(keys);
          },
          py::arg("keys"))
      .def("store", &store, py::arg("keys"), py::arg("addresses"), py::arg("sizes"),
           py::arg("name_space") = 0)
      .def("load", &load, py::arg("keys"), py::arg("addresses"), py::arg("sizes"))
      .def("pin", &pin, py::arg("keys"))
      .def("unpin", &RegionDirectory::unpin, py::arg("ticket"), ReleaseGil())
      .def(
          "remove",
          [](RegionDirectory& directory, const py::bytes& keys) {
            return answer(keys, [&](auto names, auto out) { directory.remove(names, out); });
          },
          py::arg("keys"))
      .def("clear", &RegionDirectory::clear, ReleaseGil())
      .def("reclaim", &RegionDirectory::reclaim, ReleaseGil())
      .def("stats", &stats)
      .def("slots_by_state", &slots_by_state)
      .def("usage", &usage)
      .def("participants", &participants)
      .def("entries", &entries, py::arg("first"), py::arg("count"))
      .def(
          "verify",
          [](RegionDirectory& directory, std::uint32_t first, std::uint32_t count) {
            RegionDirectory::Verified verified;
            {
              const py::gil_scoped_release release;
              verified = directory.verify(first, count);
            }
            return py::make_tuple(verified.good, verified.unchecked, verified.corrupt);
          },
          py::arg("first"), py::arg("count"))
      .def("close", &RegionDirectory::close, ReleaseGil());
}

}  // namespace hymcache
