//! Which CPUs the threads take: one for each big core, of one node, within all limits.

use super::{Cpu, Machine, print_list};

/// Threads when none are asked for: never more than this. Beyond it more threads cost more in
/// waiting for each other than they bring.
const MOST: usize = 16;

/// What the caller knows and wishes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Want<'a> {
    /// CPUs that the thread may run on ([`super::Mask::current`]); `None` is all.
    pub affinity: Option<&'a [usize]>,
    /// Threads asked for; `None` leaves the choice.
    pub threads: Option<usize>,
    /// The node where the model's pages lie, if they lie on one.
    pub node: Option<usize>,
    /// Whether the number of threads was measured to be the best, and needs no warning.
    pub tuned: bool,
    /// Whether threads may share CPUs, where there are more of them.
    pub share: bool,
}

/// Where threads run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The CPU of each thread; repeats only with [`Want::share`].
    pub cpus: Vec<usize>,
    /// Threads, the caller included; at least one.
    pub threads: usize,
    /// The CPUs that the threads may move over when their own are taken by other processes.
    pub group: Vec<usize>,
    /// CPUs that the process may keep busy: those allowed, and not above the quota.
    pub available: usize,
    /// The node of all these CPUs, on a machine with several.
    pub node: Option<usize>,
    /// The choice and its reasons in one sentence.
    pub why: String,
    /// What is unwise about the number of threads asked for, and what to do.
    pub warnings: Vec<String>,
}

impl Placement {
    /// Whether there is less CPU time than the threads could use.
    pub fn oversubscribed(&self) -> bool {
        self.threads > self.available
    }

    /// Whether each thread has a CPU of its own.
    pub fn apart(&self) -> bool {
        let apart: std::collections::BTreeSet<&usize> = self.cpus.iter().collect();
        apart.len() == self.cpus.len()
    }
}

impl Machine {
    /// Chooses the CPUs.
    ///
    /// Left to choose, it takes two thirds of the physical cores (of a node, where there are
    /// several), rounded up, at most 16, and of these only big cores, one CPU of a core, that
    /// affinity mask and control group allow, and not more than the quota. Asked for a number,
    /// it takes the same CPUs in order, then other nodes' big cores, then little ones, then
    /// SMT siblings, and warns. It does not take more threads than CPUs, unless they may share.
    pub fn place(&self, want: &Want<'_>) -> Placement {
        let allowed = self.allowed_cpus(want.affinity);
        let strong = strongest(&allowed);
        let node = self.choose_node(&allowed, &strong, want.node);
        let first = |c: &&Cpu| {
            !allowed
                .iter()
                .any(|o| o.core == c.core && o.number < c.number)
        };
        let is_big = |c: &Cpu| strong.contains(&c.number);
        let near = |c: &Cpu| node.is_none_or(|n| n == c.node);
        let mut order: Vec<&Cpu> = allowed.clone();
        // The sort is stable: CPU numbers decide what is left.
        order.sort_by_key(|c| (!first(c), !is_big(c), !near(c)));
        let best = allowed.iter().filter(|c| first(c) && is_big(c) && near(c));
        let best = best.count();

        // The whole node counts, also what the mask leaves out: its other cores draw on the
        // same memory.
        let cores = self.cpus.iter().filter(|c| c.core == c.number && near(c));
        let cores = cores.count();
        let quota = self
            .quota
            .map_or(usize::MAX, |q| (q.floor() as usize).max(1));
        let limits = [
            ((2 * cores).div_ceil(3), "two thirds of the cores"),
            (best, "all cores of the fastest kind that may be used"),
            (quota, "the control group's quota"),
            (MOST, "the most that is taken without --threads"),
        ];
        let (default, reason) = limits.into_iter().min_by_key(|l| l.0).unwrap_or(limits[1]);
        let most = if want.share {
            usize::MAX
        } else {
            allowed.len()
        };
        let threads = want.threads.unwrap_or(default).clamp(1, most);

        let cpus: Vec<usize> = order
            .iter()
            .map(|c| c.number)
            .cycle()
            .take(threads)
            .collect();
        let used = &order[..threads.min(order.len())];
        let inside = |c: &&Cpu| is_big(c) && near(c);
        let node = node.filter(|_| used.iter().all(|c| near(c)));
        let group: Vec<&Cpu> = match used.iter().all(inside) {
            true => allowed.iter().copied().filter(inside).collect(),
            false => allowed.clone(),
        };
        let available = allowed.len().min(quota);
        let asked = want.threads.filter(|_| !want.tuned);
        let warnings = asked.map_or(Vec::new(), |n| {
            let little: Vec<usize> = used
                .iter()
                .filter(|c| !is_big(c))
                .map(|c| c.number)
                .collect();
            warnings((n, threads), allowed.len(), self.quota, &little, best)
        });
        let reason = match want.threads {
            Some(_) if want.tuned => "as `runner tune` measured",
            Some(_) => "as asked for",
            None => reason,
        };
        Placement {
            why: self.sentence(&cpus, reason, node, cores, strong.len() < allowed.len()),
            group: group.iter().map(|c| c.number).collect(),
            cpus,
            threads,
            available,
            node,
            warnings,
        }
    }

    /// Numbers of threads worth measuring: each up to the number of big cores, in steps of four
    /// beyond 16, and one for each allowed core of any kind and node.
    pub fn candidates(&self, want: &Want<'_>) -> Vec<usize> {
        let of = |threads| self.place(&Want { threads, ..*want });
        let available = of(None).available;
        let allowed = self.allowed_cpus(want.affinity);
        let cores: std::collections::BTreeSet<usize> = allowed.iter().map(|c| c.core).collect();
        let cores = cores.len().min(available).max(1);
        let few = |n: &usize| *n <= MOST || n.is_multiple_of(4) || *n == cores;
        // Beyond the big cores only all cores together are worth a try.
        let big = |n: &usize| *n == cores || of(Some(*n)).warnings.is_empty();
        (1..=cores).filter(|n| few(n) && big(n)).collect()
    }

    /// Online CPUs within mask and control group; all, where nothing would be left.
    fn allowed_cpus(&self, affinity: Option<&[usize]>) -> Vec<&Cpu> {
        let within = |set: Option<&[usize]>, c: &Cpu| set.is_none_or(|s| s.contains(&c.number));
        let allowed = |c: &&Cpu| within(affinity, c) && within(self.allowed.as_deref(), c);
        let cpus: Vec<&Cpu> = self.cpus.iter().filter(allowed).collect();
        match cpus.is_empty() {
            true => self.cpus.iter().collect(),
            false => cpus,
        }
    }

    /// The node to stay on: the one of the file's pages, else the one with most free memory;
    /// not one that offers less than half of the cores that another has.
    fn choose_node(
        &self,
        allowed: &[&Cpu],
        strong: &[usize],
        wish: Option<usize>,
    ) -> Option<usize> {
        let cores = |node: usize| {
            let mut cores: Vec<usize> = allowed
                .iter()
                .filter(|c| c.node == node && strong.contains(&c.number))
                .map(|c| c.core)
                .collect();
            cores.sort_unstable();
            cores.dedup();
            cores.len()
        };
        let most = self.nodes.iter().map(|n| cores(n.number)).max()?;
        if self.nodes.len() < 2 || most == 0 {
            return None;
        }
        let enough = |n: &&super::Node| cores(n.number) * 2 >= most;
        let nodes = self.nodes.iter().filter(enough);
        let best =
            nodes.max_by_key(|n| (Some(n.number) == wish, n.free, std::cmp::Reverse(n.number)));
        best.map(|n| n.number)
    }

    fn sentence(
        &self,
        cpus: &[usize],
        reason: &str,
        node: Option<usize>,
        cores: usize,
        mixed: bool,
    ) -> String {
        let what = match cpus.len() {
            1 => "1 thread on CPU".to_owned(),
            n => format!("{n} threads on CPUs"),
        };
        let mut text = format!(
            "{what} {} ({reason}; {cores} physical cores",
            print_list(cpus),
        );
        if let Some(node) = node {
            text += &format!(" on node {node} of {}", self.nodes.len());
        }
        if mixed {
            text += ", of two or more kinds";
        }
        if let Some(quota) = self.quota {
            text += &format!(", a quota of {quota:.1} CPUs");
        }
        text + ")"
    }
}

/// Numbers of the CPUs of the highest class: performance cores of a hybrid PC; else those
/// with at least 80 % of the largest capacity; else, where capacities are absent or say
/// nothing because they are all equal, those with at least 80 % of the highest clock.
///
/// 80 % keeps an RK3588's four A76 together, whose clocks differ by 6 %, and a prime core
/// with its three neighbours.
fn strongest(cpus: &[&Cpu]) -> Vec<usize> {
    let all = || cpus.iter().map(|c| c.number).collect::<Vec<usize>>();
    if cpus.iter().any(|c| c.performance == Some(true)) {
        let strong = cpus.iter().filter(|c| c.performance == Some(true));
        return strong.map(|c| c.number).collect();
    }
    for figure in [|c: &Cpu| c.capacity, |c: &Cpu| c.max_khz] {
        let figures: Option<Vec<u64>> = cpus.iter().map(|c| figure(c)).collect();
        let Some(figures) = figures else { continue };
        let most = figures.iter().copied().max().unwrap_or(0);
        let is_strong = |f: u64| u128::from(f) * 5 >= u128::from(most) * 4;
        if !figures.iter().all(|&f| is_strong(f)) {
            let strong = cpus.iter().zip(&figures).filter(|(_, f)| is_strong(**f));
            return strong.map(|(c, _)| c.number).collect();
        }
        if figures.iter().any(|&f| f != most) {
            return all();
        }
    }
    all()
}

fn warnings(
    (asked, threads): (usize, usize),
    allowed: usize,
    quota: Option<f64>,
    little: &[usize],
    best: usize,
) -> Vec<String> {
    let mut warnings = Vec::new();
    if asked > threads {
        warnings.push(format!(
            "{threads} threads instead of {asked}: there are {allowed} CPUs to run them, and threads that share one wait for each other; --no-pin starts them all"
        ));
    } else if threads > allowed {
        warnings.push(format!(
            "{threads} threads share {allowed} CPUs and wait for each other: leave --threads out, or see `runner tune`"
        ));
    }
    if let Some(quota) = quota.filter(|&q| threads as f64 > q.max(1.0)) {
        warnings.push(format!(
            "{threads} threads with a control-group quota of {quota:.1} CPUs: they are stopped for a part of each period; ask for fewer, or raise CPUQuota= (cpu.max)"
        ));
    }
    if !little.is_empty() {
        warnings.push(format!(
            "{} of {threads} threads run on little cores (CPUs {}), and the others wait for them: --threads {best} or `runner tune`",
            little.len(),
            print_list(little),
        ));
    }
    warnings
}
