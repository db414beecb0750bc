// Bindings of shared regions; typed in hymcache/_core.pyi, section "chm_device".
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "chm_device/csrc/region.h"
#include "transport/csrc/python_values.h"

namespace py = pybind11;

namespace hymcache {
namespace {

using region::Region;

py::dict geometry(const Region& region) {
  const region::LayoutHeader& header = region.layout().header;
  py::dict out;
  out["version"] = region::MagicHeader::kVersion;
  out["region_bytes"] = header.region_bytes;
  out["slot_bytes"] = header.slot_bytes;
  out["slots"] = header.slots;
  out["data_offset"] = header.data_offset;
  out["participants"] = header.participants;
  out["pins"] = header.pins;
  out["lease_ms"] = header.lease_ms;
  out["probe_slots"] = header.probe_slots;
  out["claim"] = region.claim();
  return out;
}

std::shared_ptr<Region> open_region(const std::string& path, std::uint64_t offset,
                                    std::uint64_t size_bytes, std::uint64_t slot_bytes,
                                    const std::string& config, std::uint32_t participants,
                                    std::uint32_t pins, std::uint32_t lease_ms, bool map_data,
                                    bool writable, bool prefault, bool durable, bool force,
                                    double wait_s) {
  region::RegionOptions options{.path = path,
                                .offset = offset,
                                .bytes = size_bytes,
                                .form = std::nullopt,
                                .force = force,
                                .map_data = map_data,
                                .writable = writable,
                                .prefault = prefault,
                                .durable = durable};
  options.wait = std::chrono::duration_cast<std::chrono::milliseconds>(to_duration(wait_s));
  if (slot_bytes > 0) {
    options.form = region::RegionForm{.slot_bytes = slot_bytes,
                                      .config = config,
                                      .participants = participants,
                                      .pins = pins,
                                      .lease_ms = lease_ms};
  }
  const py::gil_scoped_release release;
  return std::make_shared<Region>(options);
}

}  // namespace

void bind_chm_device(py::module_& m) {
  const region::RegionForm form;
  py::class_<Region, std::shared_ptr<Region>>(m, "SharedRegion")
      .def(py::init(&open_region), py::arg("path"), py::kw_only(), py::arg("offset") = 0,
           py::arg("size_bytes") = 0, py::arg("slot_bytes") = 0, py::arg("config") = "",
           py::arg("participants") = form.participants, py::arg("pins") = form.pins,
           py::arg("lease_ms") = form.lease_ms, py::arg("map_data") = true,
           py::arg("writable") = true, py::arg("prefault") = false, py::arg("durable") = false,
           py::arg("force") = false, py::arg("wait_s") = 10.0)
      .def_property_readonly("formatted_here", &Region::formatted_here)
      .def_property_readonly(
          "kind",
          [](const Region& region) { return region::memory_kind_name(region.memory().kind()); })
      .def_property_readonly("config", [](const Region& region) { return region.layout().config; })
      .def_property_readonly("geometry", &geometry)
      .def(
          "prefault",
          [](Region& region) {
            region.memory().prefault();
            return region.memory().mapped_bytes();
          },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace hymcache
