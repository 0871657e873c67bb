//! States that wait in host memory while another sequence computes. Skipped, loudly, without a GPU.

mod common;

use common::random;
use wush_gpu::backend::Gpu;
use wush_gpu::carrier::HostCarrier;
use wush_gpu::kernels::{EVERYWHERE, KernelFile};
use wush_gpu::launch::Geometry;
use wush_gpu::{Buffer, Device};
use wush_model::attention::Windowed;
use wush_model::streamed::Carrier;

static SLOW: KernelFile = KernelFile {
    name: "test_slow",
    source: "// Takes CYCLES of the clock.\n\
             extern \"C\" __global__ void slow() {\n\
                 long long start = clock64();\n\
                 while (clock64() - start < CYCLES) {}\n\
             }\n",
    runs_on: EVERYWHERE,
    variants: &[&[("CYCLES", "1")]],
};
/// Some ten milliseconds: a hundred times what a copy of the states takes.
const CYCLES: &str = "20000000";

/// In the last layer nothing is parked, and the next sequence's states come while this one's work has not begun.
#[test]
fn states_are_read_before_others_take_their_room() {
    let test = "states_are_read_before_others_take_their_room";
    let Some(device) = common::device(test) else { return };
    let loader = Gpu::<f32>::new(Device::open(0).expect("a second handle"));
    let gpu = Gpu::<f32>::new(device.clone());
    let (n_rows, width, n_sequences) = (64, 1024, 6);
    let states = |sequence: usize| random(sequence as u64, n_rows * width);
    let mut carrier = HostCarrier::new(&gpu, &loader, (n_rows, width)).expect("memory");
    carrier.begin(n_sequences).expect("begun");
    for sequence in 0..n_sequences {
        let x = gpu.to_device(n_rows, states(sequence)).expect("uploaded");
        carrier.park(sequence, x).expect("parked");
    }
    let slow = device.kernel(&SLOW, "slow", &[("CYCLES", CYCLES.to_owned())]).expect("compiled");
    let mut read = |sequence: usize| {
        let x = carrier.fetch(sequence).expect("parked before");
        // SAFETY: the kernel touches no memory.
        unsafe { device.launch(&slow, Geometry::row(1, 1), &[]) }.expect("started");
        let mut copy: Buffer<f32> = device.filled(n_rows * width, 0xff).expect("filled");
        device.copy(x.matrix().view, &mut copy.view_mut()).expect("begun");
        copy
    };
    let found: Vec<Buffer<f32>> = (0..n_sequences).map(&mut read).collect();
    for (sequence, found) in found.iter().enumerate() {
        assert!(found.to_host().expect("done") == states(sequence), "sequence {sequence} has another's states");
    }
}
